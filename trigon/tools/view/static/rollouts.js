// The rollouts of a run: a list of groups with filters, and the chosen group.

import { fill, h, picker, segmented, visible } from "./dom.js";
import { count, number } from "./format.js";
import { badges, groupView, isSame, picture, rewardDots } from "./group.js";
import { fetchGroups, imageAddress } from "./source.js";
import { addressOf, goTo, readAddress, shared } from "./state.js";

const PAGE_SIZE = 50;
const FILTER_NAMES = [
  "split", "min_step", "max_step", "min_reward", "max_reward", "min_tokens", "max_tokens", "solved", "filtered",
  "outcome", "finish_reason", "tokens", "prompt_id", "text", "sort",
];
const MORE_NAMES = ["min_step", "max_step", "min_reward", "max_reward", "min_tokens", "max_tokens", "filtered", "outcome", "finish_reason", "tokens", "prompt_id"];

export function rolloutsView() {
  let parameters = {};
  let found = null; // { num_groups, num_rollouts, groups }
  let foundFor = "";
  let request = 0;
  const list = h("ol.list");
  const result = h("p.result", { role: "status" });
  const showMore = h("button.show-more", { type: "button", on: { click: () => loadMore() } }, "Show more");
  const filters = h("form.filters", { role: "search", "aria-label": "Filter rollouts", on: { submit: (event) => event.preventDefault() } });
  const group = groupView({
    onOpen: (run, other) => set({ run, group: keyOf(other) }),
    onBack: () => set({ group: "" }),
    onMove: (direction) => move(direction),
  });
  const element = h("section.view.rollouts", { "aria-label": "Rollouts" },
    filters, h("div.panes", {}, h("div.list-pane", {}, result, list, showMore), h("div.group-pane", {}, group.element)));

  // The lists below the filters are as high as the window leaves.
  new ResizeObserver(() => element.style.setProperty("--filters-height", `${filters.offsetHeight}px`)).observe(filters);

  const runNumber = () => Math.min(Number(parameters.run || 0) || 0, shared.runs.length - 1);
  const filterValues = () => Object.fromEntries(FILTER_NAMES.filter((name) => parameters[name]).map((name) => [name, parameters[name]]));

  function set(changes, { replace = false } = {}) {
    goTo("rollouts", { ...parameters, ...changes }, { replace });
  }

  const search = h("input", {
    type: "search", placeholder: "Search prompts and completions", "aria-label": "Search prompts, ground truths and completions", "data-search": true,
    spellcheck: "false", maxlength: 1000, on: { input: later(() => set({ text: search.value }, { replace: true })) },
  });
  const more = h("div.more-filters", { hidden: true });
  const moreButton = h("button", {
    type: "button", "aria-expanded": "false", on: { click: () => openMore(more.hidden) },
  }, "Filters");
  function openMore(isOpen) {
    more.hidden = !isOpen;
    filters.classList.toggle("open", isOpen);
    moreButton.setAttribute("aria-expanded", String(isOpen));
  }

  // Rebuilt when the filters change; the field in which one types is not.
  const choices = h("span.choices");
  filters.append(h("div.filter-row", {}, h("span.search", {}, search), choices), more);

  function bounds(title, name, step) {
    const inputs = ["min", "max"].map((end) => h("input", {
      type: "number", step, name: `${end}_${name}`, value: parameters[`${end}_${name}`] ?? null, "aria-label": `${title}, ${end === "min" ? "from" : "to"}`,
      placeholder: end === "min" ? "from" : "to", on: { input: later(() => set(Object.fromEntries(inputs.map((i) => [i.name, i.value])), { replace: true })) },
    }));
    return h("label.field", { role: "group", "aria-label": title }, title, inputs);
  }

  function drawFilters() {
    const state = shared.runs[runNumber()];
    const splits = Object.keys(state.splits);
    const change = (name) => (value) => set({ [name]: value });
    const numMore = MORE_NAMES.filter((name) => parameters[name]).length;
    moreButton.textContent = numMore ? `Filters (${numMore})` : "Filters";
    if (document.activeElement !== search) search.value = parameters.text || "";
    if (!more.contains(document.activeElement)) {
      fill(more,
        bounds("Step", "step", 1), bounds("Reward", "reward", "any"), bounds("Tokens", "tokens", 1),
        h("label.field", {}, "Filtered", picker("Filtered", [["", "any"], ["no", "not filtered"], ["low", "low"], ["high", "high"], ["unscored", "unscored"], ["surplus", "surplus"]], parameters.filtered || "", change("filtered"))),
        h("label.field", {}, "Reward function", picker("Outcome of the reward function", [["", "any"], ["ok", "ok"], ["not_ok", "failed or timeout"], ["failed", "failed"], ["timeout", "timeout"]], parameters.outcome || "", change("outcome"))),
        h("label.field", {}, "Ended by", picker("Ended by", [["", "any"], ["stop", "stop"], ["length", "length limit"]], parameters.finish_reason || "", change("finish_reason"))),
        h("label.field", {}, "Per-token values", picker("Per-token values", [["", "any"], ["recorded", "recorded"]], parameters.tokens || "", change("tokens"))),
        parameters.prompt_id ? h("button", { type: "button", on: { click: () => set({ prompt_id: "" }) } }, `Prompt ${visible(parameters.prompt_id)} ×`) : null);
    }
    const focused = document.activeElement;
    const label = choices.contains(focused) && (focused.closest("[role=group]")?.getAttribute("aria-label") || focused.getAttribute("aria-label"));
    const value = focused?.dataset?.value;
    fill(choices, ...[
      shared.runs.length > 1 ? picker("Run", shared.runs.map(({ name }, run) => [String(run), name]), String(runNumber()), (run) => set({ run, group: "" })) : null,
      splits.length > 1 ? segmented("Split", [["", "All"], ...splits.map((split) => [split, split[0].toUpperCase() + split.slice(1)])], parameters.split || "", change("split")) : null,
      h("span.labelled", {}, h("span.muted", {}, "Solved by"), segmented("Solved by", [["", "any"], ["none", "none"], ["some", "some"], ["all", "all"]], parameters.solved || "", change("solved"))),
      h("label.field", {}, "Sort", picker("Sort", [["newest", "newest"], ["oldest", "oldest"], ["worst", "lowest reward"], ["best", "highest reward"], ["spread", "widest rewards"], ["longest", "longest"], ["mismatch", "largest mismatch"]], parameters.sort || "newest", (value) => set({ sort: value === "newest" ? "" : value }))),
      moreButton,
      state.num_not_ok ? h("button.failed", { type: "button", "aria-pressed": String(parameters.outcome === "not_ok"), on: { click: () => set({ outcome: parameters.outcome === "not_ok" ? "" : "not_ok" }) } }, count(state.num_not_ok, "failed reward")) : null,
      Object.keys(filterValues()).some((name) => name !== "sort") ? h("button", { type: "button", on: { click: () => { search.value = ""; goTo("rollouts", { run: parameters.run, sort: parameters.sort, group: parameters.group }); } } }, "Clear") : null,
    ].filter(Boolean));
    if (label) (choices.querySelector(`[aria-label="${label}"] [data-value="${value}"]`) || choices.querySelector(`select[aria-label="${label}"]`))?.focus();
  }

  async function load() {
    const mine = ++request;
    const num = Math.max(PAGE_SIZE, found && foundFor === key() ? found.groups.length : 0);
    const run = runNumber();
    const wanted = key();
    try {
      const content = await fetchGroups(run, filterValues(), 0, Math.min(num, 200));
      if (mine !== request) return;
      found = content;
      foundFor = wanted;
      drawList();
    } catch (error) {
      if (mine !== request) return;
      found = null;
      fill(list);
      showMore.hidden = true;
      result.textContent = error.message;
    }
  }

  async function loadMore() {
    if (!found || found.groups.length >= found.num_groups) return;
    const mine = ++request;
    const { groups } = await fetchGroups(runNumber(), filterValues(), found.groups.length, PAGE_SIZE);
    if (mine !== request) return;
    found.groups.push(...groups);
    drawList();
  }

  const key = () => JSON.stringify([runNumber(), filterValues()]);

  function drawList() {
    const state = shared.runs[runNumber()];
    const isIndexing = state.num_indexed < state.num_files;
    fill(result,
      h("span", {}, `${count(found.num_groups, "group")}, ${count(found.num_rollouts, "completion")}`),
      ...(isIndexing ? [h("span.muted", {}, ` · reading ${number(state.num_indexed)} of ${number(state.num_files)} files`)] : []));
    const run = runNumber();
    fill(list, ...found.groups.map((one) => item(run, one)));
    if (!found.num_groups) {
      fill(list, h("li.empty", {}, Object.keys(state.splits).length ? "No completion matches the filters." : isIndexing ? "The rollouts are being read." : "This run has no rollouts yet."));
    }
    showMore.hidden = found.groups.length >= found.num_groups;
    markCurrent();
  }

  function rewardRange() {
    const rewards = (found ? found.groups : []).flatMap((one) => one.rewards).filter((reward) => reward !== null);
    return { low: Math.min(0, ...rewards), high: Math.max(1, ...rewards) };
  }

  function item(run, one) {
    return h("li", {}, h("a.item", { href: addressOf("rollouts", { ...parameters, group: keyOf(one) }), "data-key": keyOf(one) },
      one.image ? h("span.thumb", {}, picture(imageAddress(run, one.image), "", { loading: "lazy" })) : null,
      h("span.item-text", {},
        h("span.item-head", {}, badges(one), h("code", {}, visible(one.prompt_id))),
        h("span.excerpt", {}, visible(one.excerpt)),
        h("span.item-foot", {}, rewardDots(one.rewards, rewardRange()),
          h("span.mean", { title: "mean reward" }, number(one.reward_mean, 3))))));
  }

  function markCurrent({ scroll = false } = {}) {
    for (const link of list.querySelectorAll("a.item")) {
      const isCurrent = link.dataset.key === parameters.group;
      if (isCurrent) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
      link.href = addressOf("rollouts", { ...parameters, group: link.dataset.key });
      if (isCurrent && scroll) link.scrollIntoView({ block: "nearest" });
    }
  }

  let opened = "";
  async function openGroup() {
    element.classList.toggle("has-group", Boolean(parameters.group));
    const wanted = parameters.group ? `${runNumber()}/${parameters.group}/${parameters.text || ""}` : "";
    if (wanted === opened) return;
    opened = wanted;
    if (!wanted) {
      group.close();
      return;
    }
    const place = parseKey(parameters.group);
    try {
      const known = found?.groups.find((one) => isSame(one, place));
      await group.open(runNumber(), known || place, parameters.text || "", rewardRange());
    } catch (error) {
      if (wanted === opened) group.fail(error.message);
    }
  }

  async function show() {
    parameters = readAddress().parameters;
    drawFilters();
    if (foundFor !== key()) await load();
    // On a wide window the first group is shown at once; on a phone, the list.
    if (!parameters.group && found?.groups.length && window.matchMedia("(min-width: 821px)").matches) {
      parameters = { ...parameters, group: keyOf(found.groups[0]) };
      window.history.replaceState(null, "", addressOf("rollouts", parameters));
    }
    markCurrent({ scroll: true });
    await openGroup();
  }

  function move(direction) {
    if (!found?.groups.length) return;
    const place = found.groups.findIndex((one) => keyOf(one) === parameters.group);
    const next = found.groups[place < 0 ? 0 : place + direction];
    if (next) set({ group: keyOf(next) }, { replace: true });
    if (place + direction >= found.groups.length - 3) loadMore();
  }

  group.close();
  return {
    element,
    show,
    async onRollouts() {
      drawFilters();
      await load();
    },
    focusSearch: () => search.focus(),
    keys: {
      j: () => move(1),
      k: () => move(-1),
      ArrowLeft: () => group.step(-1),
      ArrowRight: () => group.step(1),
      c: () => group.cycleColor(),
      f: () => openMore(more.hidden),
    },
    escape: () => parameters.group && window.matchMedia("(max-width: 820px)").matches && set({ group: "" }),
  };
}

const keyOf = ({ split, step, number: position }) => `${split}-${step}-${position}`;

function parseKey(text) {
  const [split, step, position] = text.split("-");
  return { split, step: Number(step), number: Number(position) };
}

// Return a function that calls another one once no call has come for a moment.
function later(call) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(call, 150);
  };
}
