// The tokens of a completion, coloured by one of their numbers.

import { h, visible } from "./dom.js";
import { number, signed } from "./format.js";

const difference = (tokens) => tokens.old_logprobs && tokens.old_logprobs.map((value, t) =>
  value === null || tokens.sampling_logprobs[t] === null ? null : value - tokens.sampling_logprobs[t]);

const criticError = (tokens) => tokens.values && tokens.values.map((value, t) =>
  value === null || tokens.returns[t] === null ? null : tokens.returns[t] - value);

// least: the scale never ends below this, so that rounding is not drawn in full colour.
export const TOKEN_COLORS = {
  plain: { title: "Plain" },
  advantage: { title: "Advantage", isSigned: true, least: 0.01, values: (tokens) => tokens.advantages },
  entropy: { title: "Entropy", least: 0.1, unit: "nats", values: (tokens) => tokens.entropy },
  mismatch: {
    title: "Mismatch", isSigned: true, least: 0.01, unit: "nats", values: difference,
    meaning: "trainer's log-probability minus the engine's, before the update",
  },
  value: {
    title: "Value", isSigned: true, least: 0.01, values: (tokens) => tokens.values,
    meaning: "the critic's estimate of the reward to come, before the token",
  },
  td: {
    title: "TD error", isSigned: true, least: 0.01, values: criticError,
    meaning: "the return (with the critic's lambda) minus the value: how much better it went than the critic thought",
  },
  logprob: {
    title: "Log-prob", isReversed: true, least: 0.1, unit: "nats", values: (tokens) => tokens.sampling_logprobs,
    meaning: "of the sampled token, by the engine; the less likely, the stronger the colour",
  },
};

export function hasValues(rows, color) {
  return color === "plain" || rows.some((row) => row.tokens && TOKEN_COLORS[color].values(row.tokens));
}

// The largest absolute value in all completions of a group, so that their colours can be compared.
export function scaleOf(rows, color) {
  const { values, least } = TOKEN_COLORS[color];
  let scale = least;
  for (const row of rows) {
    for (const value of (row.tokens && values(row.tokens)) || []) {
      if (value !== null && Math.abs(value) > scale) scale = Math.abs(value);
    }
  }
  return scale;
}

export function legend(color, scale) {
  const { isSigned, isReversed, unit, meaning, title } = TOKEN_COLORS[color];
  const [low, high] = isSigned ? [signed(-scale), signed(scale)] : [isReversed ? number(-scale, 3) : "0", isReversed ? "0" : number(scale, 3)];
  const bar = isSigned ? "signed" : isReversed ? "reversed" : "upwards";
  return h("div.legend", { title: meaning }, h("span", {}, low), h("span.bar", { "data-scale": bar }), h("span", {}, high),
    h("span.muted", {}, [title.toLowerCase(), unit].filter(Boolean).join(", ")));
}

// Return an element with the tokens. onToken(row, t): a token is under the pointer or has the focus.
// arrange: gets the tokens' elements, and returns what contains them; without it, one text.
export function tokenText(row, color, scale, onToken, arrange = (spans) => h("div.text", {}, spans)) {
  const { tokens } = row;
  const values = TOKEN_COLORS[color].values(tokens) || [];
  const spans = tokens.texts.map((text, t) => {
    const value = values[t] ?? null;
    const span = h(value === null ? "span.token" : value < 0 && TOKEN_COLORS[color].isSigned ? "span.token.below" : "span.token.above",
      { "data-t": t }, visible(text));
    if (value !== null) span.style.setProperty("--strength", `${Math.round(Math.min(Math.abs(value) / scale, 1) * 50)}%`);
    return span;
  });
  let current = 0;
  const choose = (t, { scroll = false } = {}) => {
    if (!spans.length) return;
    spans[current].classList.remove("current");
    current = Math.max(0, Math.min(t, spans.length - 1));
    spans[current].classList.add("current");
    if (scroll) spans[current].scrollIntoView({ block: "nearest" });
    onToken(row, current);
  };
  return h("div.tokens", {
    tabindex: 0, role: "group",
    "aria-label": `Completion ${row.sample}, ${tokens.texts.length} tokens; arrow keys move between them`,
    on: {
      focus: () => choose(current),
      blur: () => spans[current]?.classList.remove("current"),
      click: (event) => event.target.dataset.t && choose(Number(event.target.dataset.t)),
      mouseover: (event) => event.target.dataset.t && onToken(row, Number(event.target.dataset.t)),
      keydown: (event) => {
        const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
        if (move === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        event.stopPropagation();
        choose(current + move, { scroll: true });
      },
    },
  }, arrange(spans));
}

// Return what is known of a token.
export function tokenFacts(row, t) {
  const { tokens } = row;
  const mismatch = difference(tokens);
  const facts = [
    ["id", tokens.ids[t]],
    ["engine log-prob", number(tokens.sampling_logprobs[t])],
    ["probability", number(Math.exp(tokens.sampling_logprobs[t] ?? NaN), 3)],
    ["trainer log-prob", tokens.old_logprobs && number(tokens.old_logprobs[t])],
    ["mismatch", mismatch && signed(mismatch[t])],
    ["entropy", tokens.entropy && number(tokens.entropy[t])],
    ["advantage", tokens.advantages && signed(tokens.advantages[t])],
    ["value", tokens.values && signed(tokens.values[t])],
    ["return", tokens.returns && signed(tokens.returns[t])],
  ];
  return [
    h("code.token-name", {}, visible(JSON.stringify(tokens.texts[t] ?? "")).slice(1, -1)),
    h("span.muted", {}, `token ${t + 1} of ${tokens.texts.length}, completion ${row.sample}`),
    h("dl", {}, facts.filter(([, value]) => value !== null && value !== undefined)
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))),
  ];
}
