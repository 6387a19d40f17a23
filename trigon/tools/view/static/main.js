// The page: its tabs, the runs, the keyboard, and updates while a run writes.

import { fill, h, store, stored } from "./dom.js";
import { number } from "./format.js";
import { exportNote, isExport } from "./source.js";
import { curvesView } from "./curves.js";
import { rolloutsView } from "./rollouts.js";
import { timesView } from "./times.js";
import { configView } from "./config.js";
import { readAddress, refresh, shared } from "./state.js";

const REFRESH_MS = 2000;
const KEYS = [
  ["1 2 3 4", "curves, rollouts, time, configuration"], ["/", "search"], ["j k", "next, previous group"],
  ["← →", "the same prompt earlier, later in training"], ["c", "next colour of tokens"], ["f", "more filters"],
  ["← → ↑ ↓", "in a coloured completion: move between tokens"], ["t", "dark or light"], ["Esc", "leave a field, close"], ["?", "this help"],
];

const views = [
  ["curves", "Curves", curvesView()], ["rollouts", "Rollouts", rolloutsView()],
  ["time", "Time", timesView()], ["configuration", "Configuration", configView()],
];
const tabs = h("nav.tabs", { "aria-label": "Views" }, views.map(([name, title]) => h("a", { href: `#${name}`, "data-view": name }, title)));
const runNames = h("div.runs");
const status = h("span.live", { role: "status" });
const notices = h("div.notices");
const help = h("dialog.help", { "aria-label": "Keys" },
  h("h2", {}, "Keys"),
  h("dl", {}, KEYS.map(([keys, text]) => h("div", {}, h("dt", {}, keys.split(" ").map((key) => h("kbd", {}, key))), h("dd", {}, text)))),
  h("p.muted", {}, "In Curves, a click on a point opens the rollouts of its step. The address of the page keeps filters and the group shown."),
  h("button", { type: "button", on: { click: () => help.close() } }, "Close"));
const themeButton = h("button.icon", { type: "button", on: { click: () => nextTheme() } });
const place = h("main", { id: "content", tabindex: -1 });

document.body.append(
  h("a.skip", { href: "#", on: { click: (event) => { event.preventDefault(); place.focus(); } } }, "Skip to the content"),
  h("header.top", {}, h("span.brand", {}, "Trigon"), tabs, runNames, h("span.right", {}, status, themeButton,
    h("button.icon", { type: "button", "aria-label": "Keys (?)", title: "Keys (?)", on: { click: () => help.showModal() } }, "?"))),
  notices, place, help);

let shownView = null;

function showAddress() {
  const { view: name } = readAddress();
  const [key, title, view] = views.find(([other]) => other === name) || views[0];
  document.title = `${title} – ${shared.runs.map((run) => run.name).join(", ")} – Trigon`;
  for (const link of tabs.children) {
    if (link.dataset.view === key) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shownView !== view) fill(place, view.element);
  shownView = view;
  run(view.show());
}

function drawRuns() {
  fill(runNames, ...shared.runs.map((state, number_) => h("button.run", {
    type: "button", title: state.path, "aria-pressed": String(!shared.hidden.has(number_)), disabled: shared.runs.length < 2,
    css: { "--color": `var(--run-${number_ % 6})` },
    on: { click: () => {
      if (!shared.hidden.delete(number_)) shared.hidden.add(number_);
      drawRuns();
      shownView.onMetrics?.();
    } },
  }, h("span.swatch"), state.name, h("span.muted", {}, state.last_step === null ? "no step yet" : `step ${number(state.last_step)}`),
  shared.runs.length > 1 && state.is_running ? h("span.live.on", {}, "live") : null)));
  const problems = shared.runs.flatMap((state) => state.problems.map((text) => `${state.name}: ${text}`));
  fill(notices,
    ...(exportNote ? [h("p.notice", {}, exportNote)] : []),
    ...problems.slice(0, 5).map((text) => h("p.problem", { role: "alert" }, text)));
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const isDark = theme === "dark" || (theme === "auto" && window.matchMedia("(prefers-color-scheme: dark)").matches);
  themeButton.textContent = isDark ? "☀" : "☾";
  themeButton.setAttribute("aria-label", isDark ? "Light (t)" : "Dark (t)");
  themeButton.title = isDark ? "Light (t)" : "Dark (t)";
  shownView?.onTheme?.();
}

function nextTheme() {
  const isDark = themeButton.textContent === "☀";
  const wanted = isDark ? "light" : "dark";
  const preferred = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = wanted === preferred ? "auto" : wanted; // back to what the system prefers
  store("theme", theme);
  setTheme(theme);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const isTyping = event.target.matches?.("input:not([type=checkbox]):not([type=range]), select, textarea");
  if (event.key === "Escape") {
    if (isTyping) event.target.blur();
    else if (!document.querySelector("dialog[open]")) shownView.escape?.();
    return;
  }
  if (isTyping || document.querySelector("dialog[open]")) return;
  if (event.target.matches?.("input[type=range]") && event.key.startsWith("Arrow")) return;
  const actions = {
    "/": () => shownView.focusSearch?.(),
    "?": () => help.showModal(),
    t: nextTheme,
    ...Object.fromEntries(views.map(([name], k) => [String(k + 1), () => { window.location.hash = name; }])),
    ...shownView.keys,
  };
  if (!Object.hasOwn(actions, event.key)) return;
  event.preventDefault();
  actions[event.key]();
});

// Shows an error of an asynchronous call instead of dropping it.
function run(promise) {
  Promise.resolve(promise).catch((error) => {
    notices.append(h("p.problem", { role: "alert" }, error.message));
  });
}

async function keepUpdated() {
  try {
    const changed = await refresh();
    const isLive = shared.runs.some((state) => state.is_running);
    status.textContent = isExport ? "" : isLive ? "live" : "not running";
    status.classList.toggle("on", !isExport && isLive);
    status.title = isLive ? "New steps appear as the run writes them" : "No process writes to this page's runs; one that resumes appears here";
    if (changed.runs) drawRuns();
    if (changed.metrics) await shownView?.onMetrics?.();
    if (changed.rollouts) await shownView?.onRollouts?.();
  } catch (error) {
    status.textContent = "not connected";
    status.classList.remove("on");
    status.title = error.message;
  }
  if (!isExport) setTimeout(keepUpdated, REFRESH_MS);
}

setTheme(stored("theme", "auto"));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(stored("theme", "auto")));
window.addEventListener("hashchange", showAddress);
keepUpdated().then(() => {
  if (shared.runs.length) showAddress();
});
