// The configurations of the runs, side by side.

import { fill, h, visible } from "./dom.js";
import { number } from "./format.js";
import { fetchConfig } from "./source.js";
import { shared } from "./state.js";

export function configView() {
  let content = { keys: [], problems: [] };
  let onlyDifferent = true;
  const search = h("input", {
    type: "search", placeholder: "Find a key or a value", "aria-label": "Find a key or a value", "data-search": true,
    spellcheck: "false", on: { input: () => build() },
  });
  const box = h("input", { type: "checkbox", checked: true, on: { change: () => { onlyDifferent = box.checked; build(); } } });
  const field = h("label.field", {}, box, "Only differences");
  const counted = h("span.muted");
  const place = h("div");
  const element = h("section.view", { "aria-label": "Configuration" },
    h("div.toolbar", {}, h("span.search", {}, search), field, counted), place);

  function build() {
    const several = shared.runs.length > 1;
    field.hidden = !several;
    const wanted = search.value.trim().toLowerCase();
    const isDifferent = ({ values }) => values.some((value) => value !== values[0]);
    const shown = content.keys.filter((entry) => (!several || !onlyDifferent || isDifferent(entry)) &&
      [entry.key, ...entry.values].some((text) => (text ?? "").toLowerCase().includes(wanted)));
    counted.textContent = `${number(shown.length)} of ${number(content.keys.length)} keys`;
    fill(place,
      ...content.problems.map((text) => h("p.problem", {}, visible(text))),
      shown.length
        ? h("div.scroll", {}, h("table.config", {},
          h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "key"), shared.runs.map(({ name }, run) =>
            h("th", { scope: "col" }, h("span.swatch", { css: { "--color": `var(--run-${run % 6})` } }), name)))),
          h("tbody", {}, shown.map((entry) => h("tr", { class: several && isDifferent(entry) ? "different" : null },
            h("th", { scope: "row" }, h("code", {}, visible(entry.key))),
            entry.values.map((value, run) => h("td", { "data-run": several ? shared.runs[run].name : null, css: { "--color": `var(--run-${run % 6})` } }, value === null ? h("span.muted", {}, "not set") : h("code", {}, visible(value)))))))))
        : h("p.empty", {}, content.keys.length ? (wanted ? "No key matches." : "The configurations are the same.") : "The run has not written its configuration yet."));
  }

  return {
    element,
    async show() {
      content = await fetchConfig();
      build();
    },
    focusSearch: () => search.focus(),
  };
}
