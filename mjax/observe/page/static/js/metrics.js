/**
 * What the overview says about the rows of metrics. Pure.
 *
 * Input: the part metrics of the store, null until the server's first answer. Output:
 * texts.
 */

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
