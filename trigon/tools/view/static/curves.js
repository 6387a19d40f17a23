// The curves of every metric, with the runs in one chart.

import { fill, h, picker, store, stored } from "./dom.js";
import { number } from "./format.js";
import { draw, label, runColor, smoothed, whenVisible } from "./charts.js";
import { goTo, shared } from "./state.js";

const MAIN_METRICS = [
  "reward/overall", "reward/accuracy", "val/reward_score", "val/accuracy_reward", "response_length/mean",
  "response_length/clip_ratio", "actor/entropy", "actor/kl_loss", "actor/kl_penalty", "actor/grad_norm",
  "actor/ppo_kl", "actor/pg_clipfrac_higher", "mismatch/logprobs_diff_mean", "group/equal_rewards_fraction",
  "reward_function/num_failed", "timing_s/step", "perf/throughput",
];

export function curvesView() {
  let smoothing = Number(stored("smoothing", "0.6"));
  let xAxis = stored("x", "step");
  let charts = [];
  const sections = h("div.sections");
  const search = h("input", {
    type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", "data-search": true, spellcheck: "false",
    on: { input: () => build() },
  });
  const shownSmoothing = h("output", {}, number(smoothing));
  const slider = h("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: smoothing, "aria-label": "Smoothing",
    on: {
      input: () => {
        smoothing = Number(slider.value);
        shownSmoothing.textContent = number(smoothing);
        store("smoothing", smoothing);
        redraw();
      },
    },
  });
  const element = h("section.view", { "aria-label": "Curves" },
    h("div.toolbar", {},
      h("span.search", {}, search),
      h("label.field", {}, "Smoothing", slider, shownSmoothing),
      h("label.field", {}, "Against", picker("Horizontal axis", [["step", "step"], ["hours", "hours"]], xAxis, (value) => {
        xAxis = value;
        store("x", value);
        redraw();
      }))),
    sections);

  function names() {
    return [...new Set(shared.metrics.flatMap((run) => Object.keys(run.metrics)))].sort();
  }

  function build() {
    const wanted = search.value.trim().toLowerCase();
    const all = names().filter((name) => name.toLowerCase().includes(wanted));
    const open = new Set([...sections.querySelectorAll("details[open]")].map((each) => each.dataset.name));
    const isFirst = !sections.childElementCount;
    charts = [];
    const grouped = new Map();
    if (!wanted) grouped.set("Overview", MAIN_METRICS.filter((name) => all.includes(name)));
    for (const name of all) {
      const prefix = name.includes("/") ? name.slice(0, name.indexOf("/")) : "other";
      grouped.set(prefix, [...(grouped.get(prefix) || []), name]);
    }
    fill(sections, ...[...grouped].filter(([, members]) => members.length).map(([title, members], k) => {
      const grid = h("div.charts");
      const details = h("details.section", {
        "data-name": title, open: Boolean(wanted) || (isFirst ? k === 0 : open.has(title)),
        on: { toggle: () => details.open && fill() },
      }, h("summary", {}, h("h2", {}, title), h("span.muted", {}, number(members.length))), grid);
      const fill = () => {
        if (grid.childElementCount) return;
        for (const name of members) grid.append(chart(name));
      };
      if (details.open) fill();
      return details;
    }));
    if (!all.length) {
      fill(sections, h("p.empty", {}, wanted ? `No metric has “${search.value}” in its name.` : "No step has ended yet. This page follows the run."));
    }
  }

  function chart(name) {
    const plot = h("div.plot");
    const latest = h("span.latest");
    const card = h("figure.chart", {}, h("figcaption", {}, h("span.name", { title: name }, name), latest), plot);
    const entry = { name, plot, latest, isShown: false };
    charts.push(entry);
    showLatest(entry);
    whenVisible(plot, () => {
      entry.isShown = true;
      drawChart(entry);
    });
    return card;
  }

  function showLatest({ name, latest, plot }) {
    const values = shared.runs.map((_, run) => [run, latestOf(shared.metrics[run], name)])
      .filter(([run, value]) => value !== null && !shared.hidden.has(run));
    fill(latest, ...values.slice(0, 4).map(([run, value]) => h("span", { css: { "--color": `var(--run-${run % 6})` } }, number(value))));
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${name}: ${values.map(([run, value]) => `${shared.runs[run].name} ${number(value)}`).join(", ")}`);
  }

  function drawChart({ name, plot }) {
    const traces = [];
    for (const run of shared.runs.keys()) {
      const metrics = shared.metrics[run];
      if (shared.hidden.has(run) || !metrics?.metrics[name]) continue;
      const kept = linesOf(metrics, name);
      const hours = xAxis === "hours" ? hoursOf(metrics) : null;
      const x = kept.map((line) => (hours ? hours[line] : metrics.steps[line]));
      const y = kept.map((line) => metrics.metrics[name][line]);
      const color = runColor(run);
      const weight = isValidation(name) || kept.length < 3 ? 0 : smoothing;
      const mode = kept.length < 2 ? "markers" : isValidation(name) ? "lines+markers" : "lines";
      const hover = `${label(shared.runs[run].name)}: %{customdata:.5~g}<extra></extra>`;
      if (weight) {
        traces.push({ x, y, mode, line: { color, width: 1 }, opacity: 0.28, hoverinfo: "skip" });
      }
      traces.push({
        x, y: smoothed(y, weight), customdata: y, mode, line: { color, width: 2 }, marker: { color, size: kept.length < 2 ? 7 : 5 }, hovertemplate: hover,
        meta: run,
      });
    }
    draw(plot, traces, { xTitle: xAxis }).then(() => {
      if (plot.dataset.listens || !plot.on) return;
      plot.dataset.listens = "yes";
      plot.on("plotly_click", ({ points }) => {
        if (xAxis !== "step") return;
        const step = points[0].x;
        goTo("rollouts", { run: points[0].data.meta ?? 0, min_step: step, max_step: step });
      });
    });
  }

  function redraw() {
    for (const entry of charts) {
      showLatest(entry);
      if (entry.isShown) drawChart(entry);
    }
  }

  let known = "";
  return {
    element,
    show() {
      const now = names().join("\n");
      if (now !== known || !sections.childElementCount) {
        known = now;
        build();
      } else {
        redraw();
      }
    },
    onMetrics() {
      this.show();
    },
    onTheme: redraw,
    focusSearch: () => search.focus(),
  };
}

// A validation is a measurement of its own, and the next one is many steps away: no average of them.
const isValidation = (name) => /^val[/_]/.test(name);

// The lines that have a metric, by step: a validation of an earlier step may have been added at the end.
function linesOf({ steps, metrics }, name) {
  const lines = new Map();
  for (const line of steps.keys()) if (metrics[name][line] !== null) lines.set(steps[line], line);
  return [...lines.keys()].sort((a, b) => a - b).map((step) => lines.get(step));
}

// The value of the last step that has a metric.
function latestOf(columns, name) {
  return columns?.metrics[name] ? columns.metrics[name][linesOf(columns, name).at(-1)] ?? null : null;
}

// Hours from the start of training to the end of the step of each line. What was added later takes none.
function hoursOf({ steps, metrics }) {
  const times = metrics["timing_s/step"] || [];
  const ends = new Map();
  steps.forEach((step, line) => ends.has(step) || ends.set(step, (times[line] ?? 0) / 3600));
  let sum = 0;
  for (const step of [...ends.keys()].sort((a, b) => a - b)) ends.set(step, (sum += ends.get(step)));
  return steps.map((step) => ends.get(step));
}
