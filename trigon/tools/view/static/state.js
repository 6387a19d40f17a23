// What all views share: the runs, their metrics, and the address, which holds what is shown.

import { fetchMetrics, fetchState } from "./source.js";

export const shared = { runs: [], metrics: [], hidden: new Set() };

// Return the view and its parameters in the address: #rollouts?run=0&text=abc.
export function readAddress() {
  const [view, query] = window.location.hash.slice(1).split("?");
  return { view, parameters: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function addressOf(view, parameters = {}) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(kept).toString();
  return `#${view}${query ? `?${query}` : ""}`;
}

// Shows an address. replace: without an entry in the browser's history.
export function goTo(view, parameters, { replace = false } = {}) {
  const address = addressOf(view, parameters);
  if (replace) {
    window.history.replaceState(null, "", address);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    window.location.hash = address;
  }
}

// Reads the state of the runs and new metrics; returns what changed.
export async function refresh() {
  const before = shared.runs;
  const { runs } = await fetchState();
  const changed = { metrics: false, rollouts: false, runs: JSON.stringify(runs) !== JSON.stringify(before) };
  for (const [run, state] of runs.entries()) {
    const old = before[run];
    if (!old || old.rollouts_version !== state.rollouts_version) changed.rollouts = true;
    const known = shared.metrics[run];
    if (!known || known.version !== state.metrics_version || known.num_lines !== state.num_lines) {
      addLines(run, await fetchMetrics(run, known ? known.num_lines : 0, known ? known.version : -1));
      changed.metrics = true;
    }
  }
  shared.runs = runs;
  return changed;
}

function addLines(run, columns) {
  const known = shared.metrics[run];
  const isMore = known && known.version === columns.version && known.num_lines + columns.steps.length === columns.num_lines;
  const target = isMore ? known : { steps: [], metrics: Object.create(null) };
  const before = target.steps.length;
  target.steps.push(...columns.steps);
  for (const name of Object.keys(columns.metrics)) target.metrics[name] ??= new Array(before).fill(null);
  for (const [name, values] of Object.entries(target.metrics)) {
    values.push(...(columns.metrics[name] || new Array(columns.steps.length).fill(null)));
  }
  shared.metrics[run] = { ...target, version: columns.version, num_lines: columns.num_lines };
}
