/**
 * Which marks of a chart to draw. Pure.
 *
 * Input: marks of a run, their positions in pixels, the width of the chart. Output: the
 * marks that fit.
 */

/** Sign, colour and name of a mark, by kind. Signs tell the kinds apart without colour. */
export const MARKS = {
  save: ["s", "muted", "save"],
  eval: ["e", "third", "evaluation"],
  restart: ["R", "accent", "restart"],
  warning: ["▲", "warn", "warning"],
  error: ["■", "bad", "error"],
};
/** Kinds that are planned: none of them is drawn if there are many. */
const ROUTINE = ["save", "eval"];
/**
 * Pixels for each mark of such a kind, and between two lines of another kind. Picked by
 * judgement: the curve stays visible between the marks.
 */
const ROOM = 40;
const NEAREST = 4;

/**
 * Return {drawn: [[mark, x]], leftOut: kinds}, in order of x.
 * at(step): position in pixels; marks outside of [left, right] are ignored.
 */
export function fitting(marks, at, [left, right]) {
  const placed = marks
    .map((mark) => [mark, at(mark.step)])
    .filter(([, x]) => x >= left && x <= right)
    .sort((a, b) => a[1] - b[1]);
  const leftOut = ROUTINE.filter((kind) => {
    const places = new Set(placed.filter(([mark]) => mark.kind === kind).map(([, x]) => x));
    return places.size > 1 && places.size * ROOM > right - left;
  });
  const last = {};
  const drawn = placed.filter(([mark, x]) => {
    const nearest = ROUTINE.includes(mark.kind) ? 0 : NEAREST;
    if (leftOut.includes(mark.kind) || x - last[mark.kind] < nearest) return false;
    last[mark.kind] = x;
    return true;
  });
  return { drawn, leftOut };
}

/** Say which kinds are left out; "" if none. */
export function sayLeftOut(kinds) {
  if (!kinds.length) return "";
  const names = kinds.map((kind) => `${MARKS[kind][2]}s`).join(" and ");
  return `Too close to draw: ${names}. Drag over steps in a chart to zoom in.`;
}
