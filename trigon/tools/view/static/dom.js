// Builds elements. Text becomes text nodes, never markup: what a run contains is untrusted.

// tag: "div.card.wide". props: on: {event: listener}, css: {"--custom-property": value}; anything
// else is an attribute; false, null and undefined leave it out. children: nodes, texts, nested lists; null is skipped.
export function h(tag, props, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(props || {})) {
    if (key === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (key === "css") {
      for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(key, value === true ? "" : String(value));
    }
  }
  return fill(element, ...children);
}

// Replaces the children of an element, as h() makes them.
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Characters that would be invisible or would reorder the text around them, shown as their code.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function visible(text) {
  return String(text ?? "").replace(/\r\n/g, "\n").replace(
    INVISIBLE, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
}

// Return nodes for a text in which each occurrence of a search text is marked.
export function marked(text, search) {
  const shown = visible(text);
  const wanted = (search || "").toLowerCase();
  const folded = shown.toLowerCase();
  if (!wanted || folded.length !== shown.length) return [shown];
  const nodes = [];
  let place = 0;
  for (let next = folded.indexOf(wanted); next >= 0 && nodes.length < 400; next = folded.indexOf(wanted, place)) {
    nodes.push(shown.slice(place, next), h("mark", {}, shown.slice(next, next + wanted.length)));
    place = next + wanted.length;
  }
  nodes.push(shown.slice(place));
  return nodes;
}

// A group of buttons of which one is pressed.
export function segmented(label, choices, value, onChange, { disabled = () => "" } = {}) {
  const buttons = choices.map(([key, text]) => {
    const reason = disabled(key);
    return h("button", {
      type: "button", "data-value": key, "aria-pressed": String(key === value), disabled: Boolean(reason), title: reason || null,
      on: { click: () => onChange(key) },
    }, text);
  });
  return h("div.segmented", { role: "group", "aria-label": label }, buttons);
}

export function picker(label, choices, value, onChange) {
  const select = h("select", { "aria-label": label, on: { change: () => onChange(select.value) } },
    choices.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return select;
}

export function stored(key, otherwise) {
  try {
    return window.localStorage.getItem(`trigon.${key}`) ?? otherwise;
  } catch {
    return otherwise; // storage is blocked: every visit starts with the defaults
  }
}

export function store(key, value) {
  try {
    window.localStorage.setItem(`trigon.${key}`, value);
  } catch {
    // storage is blocked
  }
}
