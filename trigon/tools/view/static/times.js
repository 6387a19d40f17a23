// The time of each phase of a step, stacked.

import { fill, h } from "./dom.js";
import { count, number, seconds } from "./format.js";
import { draw, label, phaseColor } from "./charts.js";
import { shared } from "./state.js";

const PHASE = "timing_s/";
const PHASE_NAMES = {
  gen: "sampling", update_actor: "update", reward: "rewards left", weights: "weight sync", parity: "parity probe",
  old: "old log-probs", ref: "reference log-probs", data: "waiting for data", save_checkpoint: "checkpoint",
};

export function timesView() {
  const content = h("div.sections");
  const element = h("section.view", { "aria-label": "Time" }, content);

  function phasesOf({ metrics }) {
    const totals = Object.entries(metrics)
      .filter(([name]) => name.startsWith(PHASE) && name !== `${PHASE}step`)
      .map(([name, values]) => [name.slice(PHASE.length), values, values.reduce((sum, value) => sum + (value ?? 0), 0)]);
    return totals.sort((a, b) => b[2] - a[2]);
  }

  function build() {
    // The same colour for a phase in each run.
    const order = [...new Set(shared.metrics.flatMap((run) => phasesOf(run).map(([name]) => name)))];
    fill(content, ...shared.runs.map((state, run) => {
      const metrics = shared.metrics[run];
      const phases = metrics ? phasesOf(metrics) : [];
      if (shared.hidden.has(run)) return null;
      if (!phases.length) return h("p.empty", {}, `${state.name}: no step has ended yet.`);
      const total = phases.reduce((sum, [, , time]) => sum + time, 0);
      // Not the line of a validation before the first step, nor one that was added to a step.
      const numSteps = new Set(metrics.steps.filter((step) => step > 0)).size;
      const plot = h("div.plot", { role: "img", "aria-label": `Seconds of each phase by step, ${state.name}` });
      const table = h("table.phases", {},
        h("thead", {}, h("tr", {}, ["phase", "total", "share", "per step"].map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, phases.map(([name, , time]) => h("tr", {},
          h("th", { scope: "row" },
            h("span.swatch", { css: { "--color": `var(--phase-${order.indexOf(name) % 10})` } }),
            PHASE_NAMES[name] || name, PHASE_NAMES[name] ? h("code.muted", {}, name) : null),
          h("td", {}, seconds(time)),
          h("td", {}, `${number(100 * time / total, 3)} %`),
          h("td", {}, seconds(time / Math.max(numSteps, 1)))))));
      requestAnimationFrame(() => draw(plot, [...phases].map(([name, values]) => ({
        type: "bar", x: metrics.steps, y: values, name: label(name), marker: { color: phaseColor(order.indexOf(name)), line: { width: 0 } },
        hovertemplate: `${label(PHASE_NAMES[name] || name)}: %{y:.3~g} s<extra></extra>`,
      })), { xTitle: "step", barmode: "stack", height: 300 }));
      return h("article.card", {},
        h("header", {}, h("h2", {}, state.name),
          h("span.muted", {}, `${seconds(total)} in ${count(numSteps, "step")}`)),
        h("div.times", {}, plot, h("div.scroll", {}, table)));
    }).filter(Boolean));
  }

  return { element, show: build, onMetrics: build, onTheme: build };
}
