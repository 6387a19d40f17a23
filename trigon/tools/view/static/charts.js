// Draws charts with Plotly, whose script is loaded when the first chart is needed.

let plotlyLoading = null;

// The page's policy refuses style attributes in markup, and so in setAttribute, which Plotly uses for
// some; styles that scripts set by property are permitted.
const setAttributeOfBrowser = Element.prototype.setAttribute;
Element.prototype.setAttribute = function setAttribute(name, value) {
  if (name === "style") this.style.cssText = value;
  else setAttributeOfBrowser.call(this, name, value);
};

function loadPlotly() {
  if (window.Plotly) return Promise.resolve(window.Plotly);
  plotlyLoading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/plotly.js";
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("the script of the charts could not be loaded")));
    document.head.append(script);
  });
  return plotlyLoading;
}

export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function runColor(run) {
  return cssColor(`--run-${run % 6}`);
}

export function phaseColor(number) {
  return cssColor(`--phase-${number % 10}`);
}

// Plotly reads labels as a kind of HTML; this makes any text a label.
export function label(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// Average over earlier points, by exponentially falling weights that are corrected for the start.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Charts are drawn one after the other, with time for the page between them.
let drawing = Promise.resolve();

export function draw(element, traces, options = {}) {
  drawing = drawing.then(() => new Promise((resolve) => setTimeout(resolve))).then(() => drawNow(element, traces, options));
  return drawing;
}

async function drawNow(element, traces, { xTitle, height = 190, barmode = null, hovermode = "x unified" }) {
  const plotly = await loadPlotly();
  if (!element.isConnected) return;
  const muted = cssColor("--muted");
  const grid = cssColor("--grid");
  const axis = {
    gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickfont: { color: muted, size: 11 }, automargin: true,
    fixedrange: window.matchMedia("(pointer: coarse)").matches,
  };
  await plotly.react(element, traces, {
    height,
    barmode,
    hovermode,
    margin: { l: 8, r: 12, t: 8, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "inherit", color: cssColor("--text"), size: 12 },
    showlegend: false,
    uirevision: "same",
    dragmode: axis.fixedrange ? false : "zoom",
    hoverlabel: { bgcolor: cssColor("--raised"), bordercolor: cssColor("--line"), font: { color: cssColor("--text"), size: 12 } },
    xaxis: { ...axis, title: { text: xTitle, font: { color: muted, size: 11 }, standoff: 4 }, nticks: 6, tickformat: ",~r" },
    yaxis: { ...axis, nticks: 5, exponentformat: "power" },
  }, { displayModeBar: false, responsive: true });
}

// Calls a function once an element is near the window.
export function whenVisible(element, show) {
  const observer = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) {
      observer.disconnect();
      show();
    }
  }, { rootMargin: "300px" });
  observer.observe(element);
}
