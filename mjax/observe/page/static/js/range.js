/**
 * Ranges that are zoomed and panned: [begin, end) within limits. Pure.
 *
 * Enters: a range, limits, a factor or a distance. Leaves: a new range inside the
 * limits, never smaller than `least`.
 */

/** Fit a range into limits; its size is kept where that is possible. */
export function clamp([begin, end], [low, high], least = 1e-9) {
  const size = Math.min(Math.max(end - begin, least), high - low);
  const middle = end - begin < least ? (begin + end) / 2 - size / 2 : begin;
  const from = Math.min(Math.max(middle, low), high - size);
  return [from, from + size];
}

/** Make a range `factor` times as large around the place `at`. */
export function zoom(range, factor, at, limits, least) {
  const [begin, end] = range;
  const size = Math.min(Math.max((end - begin) * factor, least), limits[1] - limits[0]);
  const part = (at - begin) / (end - begin || 1);
  return clamp([at - part * size, at + (1 - part) * size], limits, least);
}

/** Move a range. */
export function pan([begin, end], distance, limits) {
  return clamp([begin + distance, end + distance], limits);
}

/** A function from a range to pixels, with its inverse as `.inverse`. */
export function scale([begin, end], [low, high]) {
  const factor = (high - low) / (end - begin || 1);
  const forward = (value) => low + (value - begin) * factor;
  forward.inverse = (pixel) => begin + (pixel - low) / factor;
  return forward;
}

/**
 * The rate that is exceeded in 2% of the time of steps, for the end of an axis; null
 * without rates. A step whose metrics were read late has the time of the next one too,
 * which then seems to take almost none. The median limits the weight of slow steps. The
 * same rule as `mjax.run.plots.usual_top`.
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
