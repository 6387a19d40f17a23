// One group: its prompt and images, the same prompt over training, and all completions side by side.

import { fill, h, marked, segmented, store, stored, visible } from "./dom.js";
import { count, number, signed } from "./format.js";
import { fetchGroup, fetchHistory, imageAddress } from "./source.js";
import { shared } from "./state.js";
import { TOKEN_COLORS, hasValues, legend, scaleOf, tokenFacts, tokenText } from "./tokens.js";

const FILTERED = {
  low: "filtered: mean reward at or below the lower bound", high: "filtered: mean reward at or above the upper bound",
  unscored: "filtered: no completion was scored", surplus: "not needed: enough other groups passed the filter",
};

export function rewardDots(rewards, { low = 0, high = 1 } = {}) {
  return h("span.dots", { role: "img", "aria-label": `rewards ${rewards.map((reward) => number(reward, 3)).join(", ")}` },
    rewards.map((reward) => {
      const share = reward === null ? null : Math.max(0, Math.min(1, (reward - low) / (high - low || 1)));
      return h(share === null ? "i.none" : "i", { css: share === null ? {} : { "--share": `${Math.round(share * 100)}%` } });
    }));
}

function versionsOf(row) {
  const versions = row.policy_versions ?? [];
  if (!versions.length) return `step ${row.policy_version}`;
  return `steps ${versions.map(([version, tokens]) => `${version} (${count(tokens, "token")})`).join(", ")}`;
}

export function badges(group) {
  return [
    h("span.badge", {}, `step ${group.step}`),
    group.split !== "train" ? h("span.badge", { class: `badge ${group.split}` }, group.split) : null,
    group.filtered ? h("span.badge.filtered", { title: FILTERED[group.filtered] || null }, group.filtered) : null,
  ];
}

// onOpen(run, group): another group of the same prompt. onBack: to the list. onMove(±1): in the list.
export function groupView({ onOpen, onBack, onMove }) {
  let color = stored("color", "plain");
  let shown = null; // { run, group, rows, history }
  const facts = h("div.inspector", { "aria-live": "polite" });
  const element = h("div.group");
  const viewer = h("dialog.viewer", { "aria-label": "Image", on: { click: () => viewer.close() } });

  async function open(run, group, search, range) {
    const [{ rows }, history] = await Promise.all([fetchGroup(run, group), fetchHistory(run, group)]);
    const full = group.prompt_id === undefined ? summaryOf(group, rows) : group;
    shown = { run, group: full, rows, history: history.runs, search, range };
    draw();
    element.scrollTop = 0;
    return full;
  }

  function draw() {
    const { run, group, rows, history, search } = shown;
    const [first] = rows;
    const images = first.image_files.map((name, k) => [imageAddress(run, name), first.images[k] ?? name]);
    const siblings = history[run] || [];
    const place = siblings.findIndex((other) => isSame(other, group));
    const solved = group.num_solved;
    fill(element,
      h("header.group-head", {},
        h("button.back", { type: "button", on: { click: onBack } }, "← List"),
        h("h2", {}, h("code", {}, visible(first.prompt_id))),
        badges(group),
        h("span.muted", {}, `${solved} of ${rows.length} solved`),
        h("span.neighbours", {},
          h("button.icon", { type: "button", "aria-label": "Previous group (k)", title: "Previous group (k)", on: { click: () => onMove(-1) } }, "↑"),
          h("button.icon", { type: "button", "aria-label": "Next group (j)", title: "Next group (j)", on: { click: () => onMove(1) } }, "↓"))),
      h("div.prompt", {},
        images.length
          ? h("div.images", {}, images.map(([address, source]) => h("button.image", {
            type: "button", "aria-label": `Enlarge ${visible(source)}`, on: { click: () => enlarge(address, source) },
          }, picture(address, visible(source)))))
          : first.images.length ? h("p.muted.no-image", {}, `${count(first.images.length, "image")}, not stored by this run`) : null,
        h("div.prompt-texts", {},
          h("h3", {}, "Prompt"),
          h("div.text.clipped", {}, marked(first.prompt, search)),
          h("h3", {}, "Ground truth"),
          h("div.text", {}, marked(asText(first.ground_truth), search)),
          h("details.row", {}, h("summary", {}, "Dataset row"),
            h("pre", {}, visible(JSON.stringify(first.row, null, 1))))),
        history.some((groups) => groups.length > 1) || history.filter((groups) => groups.length).length > 1
          ? historyStrip(history, run, group, place, siblings) : null),
      h("div.completion-bar", {},
        h("h3", {}, count(rows.length, "completion")),
        segmented("Colour of tokens", Object.entries(TOKEN_COLORS).map(([key, { title }]) => [key, title]), usable(), setColor, {
          disabled: (key) => (hasValues(rows, key) ? "" : "Not recorded for this group. Runs record the first groups that a step learns from (trainer.rollout_tokens); Filters can show only those"),
        }),
        usable() === "plain" ? null : legend(usable(), scaleOf(rows, usable()))),
      h("div.completions", {}, rows.map((row) => completion(row))),
      ...(usable() === "plain" ? [] : [facts]));
    fill(facts, h("span.muted", {}, "Point at a token, or focus a completion and use the arrow keys."));
    for (const text of element.querySelectorAll(".clipped")) addMore(text);
  }

  function usable() {
    return hasValues(shown.rows, color) ? color : "plain";
  }

  function setColor(key) {
    color = key;
    store("color", key);
    if (!shown) return;
    const focused = document.activeElement?.closest?.(".completion-bar");
    draw();
    if (focused) element.querySelector(`.completion-bar [data-value="${color}"]`)?.focus();
  }

  function completion(row) {
    const parts = Object.entries(row.parts).filter(([name]) => name !== "overall");
    const current = usable();
    const hasTurns = row.turns?.length > 0;
    const text = current !== "plain" && row.tokens
      ? tokenText(row, current, scaleOf(shown.rows, current), (which, t) => fill(facts, tokenFacts(which, t)),
        hasTurns ? (spans) => turnTexts(row, tokensOfTurns(row, spans)) : undefined)
      : hasTurns
      ? turnTexts(row, row.turns.map((turn) => sampledText(turn.text)))
      : h("div.text", {}, sampledText(row.response));
    for (const part of [text, ...text.querySelectorAll(".text")]) if (part.matches(".text")) part.classList.add("clipped");
    const isSolved = (row.parts.accuracy ?? row.reward) >= 1;
    return h("article.completion", { class: `completion ${isSolved ? "solved" : ""}`, "aria-label": `Completion ${row.sample}` },
      h("header", {},
        h("span.sample", {}, `#${row.sample}`),
        h("span.reward", {}, h("span.muted", {}, "reward "), h("b", {}, number(row.reward, 3))),
        isSolved ? h("span.check", { role: "img", "aria-label": "solved" }, "✓") : null,
        row.advantage === null ? null : h("span.advantage", { class: `advantage ${row.advantage < 0 ? "below" : row.advantage > 0 ? "above" : ""}`, title: "advantage, mean over its tokens" }, `adv ${signed(row.advantage)}`),
        h("span.facts", {},
          row.finish_reason === "length" ? h("span.badge.cut", { title: "It reached the limit of its length" }, "cut") : null,
          h("span.muted", { title: `sampled with the weights after ${versionsOf(row)}` }, count(row.num_tokens, "token")))),
      parts.length ? h("ul.parts", {}, parts.map(([name, value]) => h("li", {}, h("span.muted", {}, visible(name)), " ", number(value, 3)))) : null,
      row.outcome === "ok" ? null : h("p.problem", {}, h("b", {}, `Reward function: ${visible(row.outcome)}`), " ", visible(row.error)),
      text);
  }

  function sampledText(text) {
    return text ? marked(text, shown.search) : h("span.muted", {}, "(empty)");
  }

  // sampled: for each turn, what shows the text that the model sampled.
  function turnTexts(row, sampled) {
    return h("ol.turns", {}, row.turns.map((turn, k) => h("li.turn", {},
      turn.observation || turn.image_files.length ? h("div.observation", {},
        turn.image_files.length ? h("div.images", {}, turn.image_files.map((name) => {
          const address = imageAddress(shown.run, name);
          return h("button.image", { type: "button", "aria-label": "Enlarge an observed image", on: { click: () => enlarge(address, name) } },
            picture(address, "an observed image"));
        })) : null,
        h("div.text", {}, marked(turn.observation, shown.search))) : null,
      h("div.text", {}, sampled[k]),
      turn.reward === null ? null : h("p.muted.turn-reward", {}, "reward of the turn ", number(turn.reward, 3)))));
  }

  function historyStrip(history, run, group, place, siblings) {
    return h("section.history", { "aria-label": "This prompt over training" },
      h("h3", {}, "This prompt over training"),
      h("div.strips", {}, history.map((groups, other) => groups.length === 0 ? null : [
        shared.runs.length > 1 ? h("span.run-name", { css: { "--color": `var(--run-${other % 6})` } }, shared.runs[other].name) : null,
        h("div.marks", {}, groups.map((one) => h("button.mark", {
          type: "button",
          "aria-current": other === run && isSame(one, group) ? "true" : null,
          title: `step ${one.step}, ${one.split}: mean reward ${number(one.reward_mean, 3)}, ${one.num_solved} of ${one.num} solved`,
          "aria-label": `step ${one.step}, ${one.split}, mean reward ${number(one.reward_mean, 3)}`,
          on: { click: () => onOpen(other, one) },
        }, h("span.column", { css: { "--share": `${Math.round(shareOf(one.reward_mean) * 100)}%` }, class: `column ${one.split}` }),
        h("span.step", {}, one.step)))),
      ])),
      siblings.length > 1 ? h("p.muted.hint", {}, `${place + 1} of ${siblings.length}; ← and → move along. Validations are outlined.`) : null);
  }

  function shareOf(reward) {
    const { low, high } = shown.range;
    return reward === null ? 0 : Math.max(0, Math.min(1, (reward - low) / (high - low || 1)));
  }

  function enlarge(address, source) {
    fill(viewer, picture(address, visible(source)), h("p", {}, visible(source)));
    if (!viewer.isConnected) document.body.append(viewer);
    viewer.showModal();
  }

  return {
    element,
    open,
    close: () => { shown = null; fill(element, h("p.empty", {}, "Choose a group on the left; j and k move through the list.")); },
    fail: (text) => { shown = null; fill(element, h("button.back", { type: "button", on: { click: onBack } }, "← List"), h("p.problem", {}, text)); },
    current: () => shown,
    cycleColor() {
      if (!shown) return;
      const keys = Object.keys(TOKEN_COLORS).filter((key) => hasValues(shown.rows, key));
      setColor(keys[(keys.indexOf(usable()) + 1) % keys.length]);
    },
    step(direction) {
      const siblings = shown ? shown.history[shown.run] || [] : [];
      const next = siblings[siblings.findIndex((other) => isSame(other, shown.group)) + direction];
      if (next) onOpen(shown.run, next);
    },
  };
}

export function isSame(one, other) {
  return one.split === other.split && one.step === other.step && one.number === other.number;
}

// What the list has of a group, from its rows: for an address that was opened directly.
function summaryOf({ split, step, number: position }, rows) {
  return {
    split, step, number: position, prompt_id: rows[0].prompt_id, filtered: rows[0].filtered, num: rows.length,
    num_solved: rows.filter((row) => (row.parts.accuracy ?? row.reward) >= 1).length,
    rewards: rows.map((row) => row.reward),
  };
}

export function picture(address, description, props = {}) {
  const image = h("img", { src: address, alt: description, ...props });
  image.addEventListener("error", () => image.replaceWith(h("span.missing", {}, "image not found")), { once: true });
  return image;
}

// The elements of a completion's tokens, by turn: a turn says how many of them it sampled.
function tokensOfTurns(row, spans) {
  let start = 0;
  return row.turns.map((turn) => spans.slice(start, (start += turn.num_tokens)));
}

function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

// Adds a button that shows all of a text, if it is higher than its box.
function addMore(text) {
  requestAnimationFrame(() => {
    if (text.scrollHeight <= text.clientHeight + 24) return;
    const button = h("button.more", { type: "button", "aria-expanded": "false", on: {
      click: () => {
        const isOpen = text.classList.toggle("open");
        button.textContent = isOpen ? "Show less" : "Show all";
        button.setAttribute("aria-expanded", String(isOpen));
      },
    } }, "Show all");
    text.after(button);
  });
}
