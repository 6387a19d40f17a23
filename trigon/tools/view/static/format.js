// Numbers as text.

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en-US").replace("-", "−");
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6)
    ? value.toExponential(2)
    : String(Number(value.toPrecision(digits)));
  return text.replace(/^-/, "−").replace("e-", "e−").replace("e+", "e");
}

export function signed(value, digits = 3) {
  const text = number(value, digits);
  return value > 0 ? `+${text}` : text;
}

export function count(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function seconds(value) {
  if (value >= 5400) return `${number(value / 3600, 3)} h`;
  if (value >= 90) return `${number(value / 60, 3)} min`;
  return `${number(value, 3)} s`;
}
