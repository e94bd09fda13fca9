/**
 * Zoom and pan ranges [begin, end) within limits. Pure.
 *
 * Input: a range, limits, a factor or a distance. Output: a new range inside the limits,
 * never smaller than `least`.
 */

/** Move a range into limits, and keep its size if `least` and the limits allow it. */
export function clamp([begin, end], [low, high], least = 1e-9) {
  const size = Math.min(Math.max(end - begin, least), high - low);
  const middle = end - begin < least ? (begin + end) / 2 - size / 2 : begin;
  const from = Math.min(Math.max(middle, low), high - size);
  return [from, from + size];
}

/** Make a range `factor` times as large; the value `at` keeps its position. */
export function zoom(range, factor, at, limits, least) {
  const [begin, end] = range;
  const size = Math.min(Math.max((end - begin) * factor, least), limits[1] - limits[0]);
  const part = (at - begin) / (end - begin || 1);
  return clamp([at - part * size, at + (1 - part) * size], limits, least);
}

/** Move a range by a distance. */
export function pan([begin, end], distance, limits) {
  return clamp([begin + distance, end + distance], limits);
}

/** Return a linear function from a range to pixels, with its inverse as `.inverse`. */
export function scale([begin, end], [low, high]) {
  const factor = (high - low) / (end - begin || 1);
  const forward = (value) => low + (value - begin) * factor;
  forward.inverse = (pixel) => begin + (pixel - low) / factor;
  return forward;
}

/**
 * Return the rate that is exceeded in 2% of the time of steps, as the end of an axis; null
 * without rates. If the metrics of a step are read late, its time includes that of the next
 * step, which then seems to take almost none. A step weighs at most the median time, so that
 * slow steps do not dominate. `mjax.run.plots.usual_top` has the same rule.
 */
export function usualTop(values) {
  const ordered = values.filter((each) => each > 0).sort((a, b) => a - b);
  if (!ordered.length) return null;
  const most = 1 / ordered[(ordered.length - 1) >> 1];
  const weights = ordered.map((each) => Math.min(1 / each, most));
  const limit = 0.98 * weights.reduce((sum, each) => sum + each, 0);
  let past = 0;
  return ordered.find((_, index) => (past += weights[index]) >= limit) ?? ordered.at(-1);
}
