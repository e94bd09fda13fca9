/**
 * Gestures of the heat map: zoom, pan and cursor by pointer, wheel and keys.
 *
 * Input: events on the picture, and the state {model, view, cursor, dragged} of
 * views/heat.js. Output: calls with a new view; `cursor` and `dragged` are set here.
 */

import { follow } from "../js/canvas.js";
import { frame, under } from "../js/heat_canvas.js";
import { largest } from "../js/heat_data.js";
import { clamp, pan, scale, zoom } from "../js/range.js";

const LEAST = 4; // minimum number of visible columns or rows

/** Return the view of all columns and rows. */
export function limitsOf({ matrix, order }) {
  return { x: [0, Math.max(1, matrix.cols)], y: [0, Math.max(1, order.length)] };
}

/** Return whether all columns and rows are visible. */
export function wholeOf({ model, view }) {
  const limits = limitsOf(model);
  return ["x", "y"].every(
    (axis) => view[axis][0] <= limits[axis][0] + 0.5 && view[axis][1] >= limits[axis][1] - 0.5,
  );
}

/** Return a view `factor` times as large around a position or, without one, the cursor. */
export function zoomed(is, factor, at = null) {
  const limits = limitsOf(is.model);
  const cursor = is.cursor;
  const place =
    at ??
    (cursor
      ? { x: cursor.col + 0.5, y: cursor.place + 0.5 }
      : { x: (is.view.x[0] + is.view.x[1]) / 2, y: (is.view.y[0] + is.view.y[1]) / 2 });
  return Object.fromEntries(
    ["x", "y"].map((axis) => [
      axis,
      zoom(is.view[axis], factor, place[axis], limits[axis], Math.min(LEAST, limits[axis][1])),
    ]),
  );
}

/** Follow keys, wheel and pointers. does: {change(view, kind), all(), drawCursor(kind), go}. */
export function attach(picture, is, { change, all, drawCursor, go }) {
  const point = (at) => {
    const cells = at && is.model && under(picture, is.model, is.view, at);
    if (!cells) return null;
    const best = largest(
      is.model.bytes,
      is.model.matrix.cols,
      is.model.order,
      cells.rows,
      cells.cols,
    );
    return { ...best, place: is.model.order.indexOf(best.row, cells.rows[0]) };
  };
  follow(picture, {
    hover(at) {
      is.cursor = point(at);
      drawCursor("hover");
    },
    click(at) {
      is.cursor = point(at);
      drawCursor("pick");
    },
    drag({ from, to, done }) {
      const box = frame(picture);
      const fit = ({ x, y }) => [
        Math.min(Math.max(x, box.left), box.right),
        Math.min(Math.max(y, box.top), box.bottom),
      ];
      let [[x0, y0], [x1, y1]] = [fit(from), fit(to)];
      if (Math.abs(x1 - x0) < 6) [x0, x1] = [box.left, box.right];
      if (Math.abs(y1 - y0) < 6) [y0, y1] = [box.top, box.bottom];
      is.dragged = done ? null : { x0, y0, x1, y1 };
      if (!done) return drawCursor("drag");
      const limits = limitsOf(is.model);
      const part = (axis, low, high, span) => {
        const at = scale(is.view[axis], span).inverse;
        return clamp(
          [at(Math.min(low, high)), at(Math.max(low, high))],
          limits[axis],
          Math.min(LEAST, limits[axis][1]),
        );
      };
      return change(
        {
          x: part("x", x0, x1, [box.left, box.right]),
          y: part("y", y0, y1, [box.top, box.bottom]),
        },
        "zoom",
      );
    },
    wheel({ x, y, dy, zoom: isZoom }) {
      if (!isZoom || !is.model) return false;
      const box = frame(picture);
      const at = {
        x: scale(is.view.x, [box.left, box.right]).inverse(x),
        y: scale(is.view.y, [box.top, box.bottom]).inverse(y),
      };
      change(zoomed(is, dy > 0 ? 1.25 : 0.8, at), "zoom");
      return true;
    },
  });
  picture.box.addEventListener("dblclick", all);
  picture.box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !is.model) return;
    if (onKey(event, picture, is, { change, all, drawCursor, go })) event.preventDefault();
  });
}

function onKey(event, picture, is, { change, all, drawCursor, go }) {
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const move = moves[event.key];
  const limits = limitsOf(is.model);
  if (move && event.shiftKey) {
    const by = (axis, sign) =>
      pan(is.view[axis], (sign * (is.view[axis][1] - is.view[axis][0])) / 8, limits[axis]);
    change({ x: by("x", move[0]), y: by("y", move[1]) }, "pan");
  } else if (move) {
    moveCursor(picture, is, move, limits);
    drawCursor("hover");
  } else if (event.key === "+" || event.key === "=") change(zoomed(is, 0.7), "zoom");
  else if (event.key === "-") change(zoomed(is, 1 / 0.7), "zoom");
  else if (event.key === "0" || event.key === "Home") all();
  else if (event.key === "Enter" && is.cursor)
    go("groups", { rank: is.model.matrix.ranks[is.cursor.row] });
  else return false;
  return true;
}

function moveCursor(picture, is, [dx, dy], limits) {
  const { matrix, order, bytes } = is.model;
  const box = frame(picture);
  const size = (axis, span) =>
    Math.max(1, Math.round((is.view[axis][1] - is.view[axis][0]) / span));
  const old = is.cursor ?? {
    col: Math.floor((is.view.x[0] + is.view.x[1]) / 2),
    place: Math.floor((is.view.y[0] + is.view.y[1]) / 2),
  };
  const bounded = (value, [low, high]) => Math.min(Math.max(value, low), high - 1);
  const col = bounded(old.col + dx * size("x", box.right - box.left), limits.x);
  const place = bounded(old.place + dy * size("y", box.bottom - box.top), limits.y);
  is.cursor = { col, place, row: order[place], byte: bytes[order[place] * matrix.cols + col] };
}
