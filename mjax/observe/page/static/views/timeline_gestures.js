/**
 * Gestures of the timeline: zoom, pan and choice by pointer, wheel and keys.
 *
 * Input: events on the picture, and the state {model, view, hovered, picked, dragged} of
 * views/timeline.js. Output: calls with a new range or a span.
 */

import { follow } from "../js/canvas.js";
import { clamp, pan, scale, zoom } from "../js/range.js";
import { frame, rowAt } from "../js/timeline_canvas.js";
import { beside, spanAt } from "../js/timeline_data.js";

/** Smallest visible range of time, in microseconds. */
export const LEAST_US = 5;

/** Move the view so that a span is visible. */
export function bringIntoView(is, picture, span) {
  const [start, end] = [is.model.spans.start_us[span], is.model.spans.end_us[span]];
  const [low, high] = is.view.x;
  if (end < low || start > high) {
    is.view.x = clamp(
      [(start + end - high + low) / 2, (start + end + high - low) / 2],
      [is.model.begin, is.model.end],
    );
  }
  const box = frame(picture, is.model);
  const y = is.model.spans.row[span] * box.size;
  if (y < is.view.top) is.view.top = y;
  if (y + box.size > is.view.top + box.bottom - box.top)
    is.view.top = y + box.size - (box.bottom - box.top);
}

/** Follow keys, wheel and pointers. does: {change(x, kind), draw(kind), drawCursor(kind), pick(span), limits()}. */
export function attach(picture, is, { change, draw, drawCursor, pick, limits }) {
  const axis = () => {
    const box = frame(picture, is.model);
    return scale(is.view.x, [box.left, box.right]);
  };
  const find = (at) => {
    const row = at && is.model && rowAt(picture, is.model, is.view, at);
    if (row === null || row === undefined) return null;
    const time = axis().inverse;
    return spanAt(is.model, row, time(at.x), Math.abs(time(3) - time(0)));
  };
  follow(picture, {
    hover(at) {
      is.hovered = find(at);
      drawCursor("hover");
    },
    click(at) {
      if (is.model) pick(find(at));
    },
    drag({ from, last, to, shift, done }) {
      if (!is.model) return;
      const time = axis().inverse;
      if (!shift) {
        is.view.top -= to.y - last.y;
        change(pan(is.view.x, time(last.x) - time(to.x), limits()), "pan");
        return;
      }
      is.dragged = done ? null : [from.x, to.x];
      if (!done) drawCursor("drag");
      else
        change(
          clamp([time(Math.min(from.x, to.x)), time(Math.max(from.x, to.x))], limits(), LEAST_US),
          "zoom",
        );
    },
    wheel({ x, dx, dy, zoom: isZoom }) {
      if (!is.model) return false;
      const time = axis().inverse;
      if (isZoom) {
        change(zoom(is.view.x, dy > 0 ? 1.25 : 0.8, time(x), limits(), LEAST_US), "zoom");
        return true;
      }
      if (Math.abs(dx) > Math.abs(dy)) {
        change(pan(is.view.x, time(dx) - time(0), limits()), "pan");
        return true;
      }
      const { hidden } = frame(picture, is.model);
      const top = Math.min(Math.max(is.view.top + dy, 0), hidden);
      if (top === is.view.top) return false;
      is.view.top = top;
      draw("pan");
      return true;
    },
  });
  picture.box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !is.model) return;
    const [low, high] = is.view.x;
    const acts = {
      ArrowLeft: () => change(pan(is.view.x, (low - high) / 8, limits()), "pan"),
      ArrowRight: () => change(pan(is.view.x, (high - low) / 8, limits()), "pan"),
      ArrowUp: () => {
        is.view.top -= 48;
        draw("pan");
      },
      ArrowDown: () => {
        is.view.top += 48;
        draw("pan");
      },
      "+": () => change(zoom(is.view.x, 0.7, (low + high) / 2, limits(), LEAST_US), "zoom"),
      "-": () => change(zoom(is.view.x, 1 / 0.7, (low + high) / 2, limits(), LEAST_US), "zoom"),
      0: () => change(limits(), "zoom"),
      "]": () => pick(is.picked === null ? firstSpan(is.model) : beside(is.model, is.picked, 1)),
      "[": () => pick(is.picked === null ? firstSpan(is.model) : beside(is.model, is.picked, -1)),
      Escape: () => pick(null),
    };
    acts["="] = acts["+"];
    acts.Home = acts[0];
    if (!Object.hasOwn(acts, event.key)) return;
    acts[event.key]();
    event.preventDefault();
  });
}

function firstSpan(model) {
  return model.rows.find((row) => row.order.length)?.order[0] ?? null;
}
