// Where the page's data come from: the server, or what an exported file embeds.

const embedded = document.getElementById("embedded");
const exported = embedded ? JSON.parse(embedded.textContent) : null;

export const isExport = exported !== null;
export const exportNote = exported ? exported.note : "";

async function get(name, parameters = {}) {
  const response = await fetch(`/api/${name}?${new URLSearchParams(parameters)}`);
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(content.error || `the server answered ${response.status}`);
  return content;
}

export async function fetchState() {
  return exported ? exported.state : get("state");
}

export async function fetchMetrics(run, since, version) {
  return exported ? exported.metrics[run] : get("metrics", { run, since, version });
}

export async function fetchConfig() {
  return exported ? exported.config : get("config");
}

// filters: as the fields of RolloutFilter; only those that are set.
export async function fetchGroups(run, filters, offset, limit) {
  if (!exported) return get("groups", { run, ...filters, offset, limit });
  const found = exported.groups[run]
    .map((group) => [group, group.rows.filter((row) => matches(group, row, filters)).length])
    .filter(([, num]) => num > 0);
  found.sort(([a], [b]) => ORDERS[filters.sort || "newest"](a, b));
  return {
    num_groups: found.length,
    num_rollouts: found.reduce((sum, [, num]) => sum + num, 0),
    groups: found.slice(offset, offset + limit).map(([group]) => group),
  };
}

export async function fetchGroup(run, { split, step, number }) {
  if (!exported) return get("group", { run, split, step, number });
  const group = exported.groups[run].find((g) => g.split === split && g.step === step && g.number === number);
  if (!group) throw new Error("this file does not have the group");
  return { rows: group.rows };
}

// The groups of the prompt of a group, in each run.
export async function fetchHistory(run, { split, step, number }) {
  if (!exported) return get("history", { run, split, step, number });
  const { rows: [shown] } = await fetchGroup(run, { split, step, number });
  const isOfPrompt = (group) => isSamePrompt(group.rows[0], shown, (group.split === "validation") === (split === "validation"));
  return { runs: exported.groups.map((groups) => groups.filter(isOfPrompt).sort((a, b) => a.step - b.step)) };
}

// As IndexedRun.history: a training and a validation dataset may give equal ids to other prompts.
function isSamePrompt(row, other, isSameKind) {
  const [image, otherImage] = [row, other].map(({ image_files: [name] }) => name?.slice(0, 71)); // images/<SHA-256>
  const text = ({ prompt, ground_truth }) => JSON.stringify([prompt, ground_truth]);
  return originalId(row.prompt_id) === originalId(other.prompt_id) && (isSameKind || text(row) === text(other))
    && (!image || !otherImage || image === otherImage);
}

export function imageAddress(run, name) {
  if (!/^images\/[A-Za-z0-9_-][A-Za-z0-9._-]*$/.test(name)) return "";
  if (exported) return exported.images[`${run}/${name}`] || "";
  return `/image/${run}/${name}`;
}

const largest = (key) => (a, b) => (b[key] ?? -Infinity) - (a[key] ?? -Infinity) || b.step - a.step;
const spread = (group) => {
  const rewards = group.rewards.filter((reward) => reward !== null);
  return rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0;
};
const ORDERS = {
  newest: (a, b) => b.step - a.step || a.number - b.number,
  oldest: (a, b) => a.step - b.step || a.number - b.number,
  worst: (a, b) => (a.reward_mean ?? Infinity) - (b.reward_mean ?? Infinity) || b.step - a.step,
  best: largest("reward_mean"),
  spread: (a, b) => spread(b) - spread(a) || b.step - a.step,
  longest: largest("max_tokens"),
  mismatch: largest("mismatch"),
};

// A prompt's further occurrences have their number at the end: train:17#2.
const originalId = (id) => id.replace(/#\d+$/, "");

const within = (value, lower, upper) =>
  (lower === undefined || (value !== null && value >= Number(lower))) &&
  (upper === undefined || (value !== null && value <= Number(upper)));

// The conditions of trigon/tools/view/index.py on what an exported file embeds.
function matches(group, row, f) {
  const solved = { none: group.num_solved === 0, all: group.num_solved === group.num };
  solved.some = !solved.none && !solved.all;
  const text = (f.text || "").toLowerCase();
  return within(group.step, f.min_step, f.max_step) &&
    within(row.reward, f.min_reward, f.max_reward) &&
    within(row.num_tokens, f.min_tokens, f.max_tokens) &&
    (!f.split || group.split === f.split) &&
    (!f.prompt_id || originalId(group.prompt_id) === f.prompt_id) &&
    (!f.tokens || group.num_with_tokens > 0) &&
    (!f.finish_reason || row.finish_reason === f.finish_reason) &&
    (!f.filtered || group.filtered === (f.filtered === "no" ? "" : f.filtered)) &&
    (!f.outcome || (f.outcome === "not_ok" ? row.outcome !== "ok" : row.outcome === f.outcome)) &&
    (!f.solved || solved[f.solved]) &&
    (!text || [row.prompt_id, row.prompt, String(row.ground_truth), row.response]
      .some((part) => part.toLowerCase().includes(text)));
}
