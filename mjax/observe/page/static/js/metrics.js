/**
 * What the overview says about the rows of metrics. Pure.
 *
 * Input: the part metrics of the store, null until the server's first answer. Output:
 * texts, and means of the last rows.
 */

/** Rows in a mean, as in mjax.run.speed: one wrong row changes it little. */
const MEAN_ROWS = 10;

const LOADING = { what: "Loading", why: "The server is reading the files of the run." };
const NO_ROWS = {
  what: "No steps yet",
  why:
    "metrics.jsonl has no rows yet. They appear with the first steps; " +
    "a step may take minutes while it compiles.",
};

/** Return why there are no curves to draw, as {what, why}; null if there are rows. */
export function whyNoRows(metrics) {
  if (metrics?.steps?.length) return null;
  if (metrics?.failed) return { what: "No answer", why: metrics.problem };
  return metrics?.is_complete ? NO_ROWS : LOADING;
}

/**
 * Return the mean timing of the last steps of a start: {num, step_s, tokens_per_s, mfu},
 * null without rows. num: number of steps in the mean.
 *
 * A single row may be wrong, because the time of a step may include that of the next one.
 * tokens_per_s is all tokens over all seconds, and mfu is weighted by time, so the three
 * values agree. Evaluations and saves are in no step's time. The first step of a start
 * includes the compilation, and counts only if it is the only one. `mjax.run.speed` has
 * the same rules.
 */
export function recentMean(metrics) {
  const { steps = [], columns = {}, marks = [] } = metrics ?? {};
  const { step_s = [], tokens = [], mfu = [] } = columns;
  if (!steps.length || typeof step_s.at(-1) !== "number") return null;
  const starts = new Set(marks.filter(({ kind }) => kind === "restart").map(({ step }) => step));
  starts.add(steps[0]);
  let first = steps.length - 1;
  while (first > 0 && !starts.has(steps[first]) && steps.length - first < MEAN_ROWS) {
    if (starts.has(steps[first - 1])) break;
    first -= 1;
  }
  const time_s = sum(step_s.slice(first));
  const worked = mfu.slice(first).map((each, at) => (each ?? NaN) * step_s[first + at]);
  const known = (value) => (Number.isFinite(value) ? value : null);
  return {
    num: steps.length - first,
    step_s: known(time_s / (steps.length - first)),
    tokens_per_s: tokens.length ? known(sum(tokens.slice(first)) / time_s) : null,
    mfu: worked.length ? known(sum(worked) / time_s) : null,
  };
}

/** Return the median of the known values, as in summary.json; null without values. */
export function median(values) {
  const known = values.filter((each) => each !== null).sort((a, b) => a - b);
  if (!known.length) return null;
  return (known[(known.length - 1) >> 1] + known[known.length >> 1]) / 2;
}

function sum(values) {
  return values.reduce((total, each) => total + (each ?? NaN), 0);
}
