/**
 * Numbers as text, with units and a fixed number of digits, so that columns align.
 *
 * Input: numbers, in the unit that each function names; lists of ranks; typed ranks.
 * Output: text for people; lists of ranks. Pure.
 */

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const NONE = "–";

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** A count with separators. */
export function count(value) {
  return isNumber(value) ? WHOLE.format(value) : NONE;
}

/** A number with `num` significant digits, but whole if it is large: 0.0123, 1.23, 1,235. */
export function digits(value, num = 3) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 10 ** (num - 1)) return WHOLE.format(value);
  if (size === 0) return "0";
  if (size < 1e-4) return value.toExponential(num - 1);
  return value.toPrecision(num);
}

/** A rate such as 412,000 as "412 k". */
export function rate(value) {
  if (!isNumber(value)) return NONE;
  for (const [size, unit] of [
    [1e9, " G"],
    [1e6, " M"],
    [1e4, " k"],
  ]) {
    if (Math.abs(value) >= size) return digits(value / (size === 1e4 ? 1e3 : size)) + unit;
  }
  return digits(value);
}

/** A fraction as percent. */
export function percent(value, places = 1) {
  return isNumber(value) ? `${(100 * value).toFixed(places)}%` : NONE;
}

/** A ratio: "1.25×". */
export function times(value) {
  return isNumber(value) ? `${value.toFixed(2)}×` : NONE;
}

/** A duration, given in seconds, in units from microseconds to days. */
export function seconds(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${digits(value * 1e6)} µs`;
  if (size < 1) return `${digits(value * 1e3)} ms`;
  if (size < 120) return `${digits(value)} s`;
  if (size < 7200) return `${Math.floor(value / 60)} min ${pad(value % 60)} s`;
  if (size < 172800) return `${Math.floor(value / 3600)} h ${pad((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${pad((value % 86400) / 3600)} h`;
}

function pad(value) {
  return String(Math.floor(value)).padStart(2, "0");
}

/** A duration, given in milliseconds. */
export function millis(value) {
  return isNumber(value) ? seconds(value / 1e3) : NONE;
}

/** A duration, given in microseconds. */
export function micros(value) {
  return isNumber(value) ? seconds(value / 1e6) : NONE;
}

/** A time in nanoseconds since 1970, as day and time in the time zone of the browser. */
export function clock(timeNs) {
  if (!isNumber(timeNs)) return NONE;
  const when = new Date(timeNs / 1e6);
  const day = `${when.getFullYear()}-${pad(when.getMonth() + 1)}-${pad(when.getDate())}`;
  return `${day} ${pad(when.getHours())}:${pad(when.getMinutes())}:${pad(when.getSeconds())}`;
}

/** Ranks as ranges: [0, 1, 2, 5] is "0–2, 5"; ranks beyond `most` ranges are counted. */
export function ranks(list, most = 6) {
  const sorted = [...new Set(list)].sort((a, b) => a - b);
  const parts = [];
  for (const rank of sorted) {
    const last = parts.at(-1);
    if (last && last[1] === rank - 1) last[1] = rank;
    else parts.push([rank, rank]);
  }
  const told = parts
    .slice(0, most)
    .map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`));
  const rest = parts.slice(most).reduce((sum, [a, b]) => sum + b - a + 1, 0);
  if (!told.length) return "none";
  return told.join(", ") + (rest ? ` and ${count(rest)} more` : "");
}

/**
 * Read typed ranks such as "0-15, 32". Returns {ranks}, ascending, or {error}.
 * known: ranks that exist.
 */
export function parseRanks(text, known) {
  const found = new Set();
  const exists = new Set(known);
  for (const part of text
    .split(",")
    .map((each) => each.trim())
    .filter(Boolean)) {
    const match = /^(\d+)(?:\s*[-–]\s*(\d+))?$/.exec(part);
    if (!match) return { error: `"${part}" is not a rank; write ranks such as 0-15, 32` };
    const [low, high] = [Number(match[1]), Number(match[2] ?? match[1])];
    if (high < low) return { error: `"${part}" ends before it begins` };
    for (const rank of exists) if (rank >= low && rank <= high) found.add(rank);
    if (low === high && !exists.has(low)) return { error: `there is no rank ${low}` };
  }
  if (!found.size) return { error: "no such ranks; write ranks such as 0-15, 32" };
  return { ranks: [...found].sort((a, b) => a - b) };
}

/** "1 rank", "2 ranks". */
export function plural(num, one, many = `${one}s`) {
  return `${count(num)} ${num === 1 ? one : many}`;
}
