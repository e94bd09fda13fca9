/**
 * Schedule the drawing of pictures, and measure its time.
 *
 * Enters: functions that draw, with the view and the kind of the change (zoom, pan,
 * hover, pick, live, first). Leaves: at most one call of each in a frame, and
 * `window.mjaxDrawTimes`: rows {view, kind, ms, frame_ms}. `ms` is the time of the
 * function, and of the work that was done for it before (`work`); `frame_ms` goes on
 * until the browser has painted the frame and takes tasks again, so that rasterisation
 * counts.
 */

const KEPT = 20_000;
const times = [];
window.mjaxDrawTimes = times;
const before = new Map();

/** Do work for the next redraw of a view, and count it as part of that redraw. */
export function work(view, call) {
  const begin = performance.now();
  try {
    return call();
  } finally {
    before.set(view, (before.get(view) ?? 0) + performance.now() - begin);
  }
}

/** Make a redraw: call it with a kind, as often as you like. */
export function redrawer(view, draw) {
  let kinds = null;
  return (kind) => {
    if (kinds) {
      kinds.add(kind);
      return;
    }
    kinds = new Set([kind]);
    requestAnimationFrame(() => {
      const due = kinds;
      kinds = null;
      measure(view, [...due].join("+"), () => draw(due));
    });
  };
}

function measure(view, kind, draw) {
  const begin = performance.now();
  const drawn = draw();
  if (drawn === false) return; // nothing was visible
  const worked = before.get(view) ?? 0;
  before.delete(view);
  const row = { view, kind, ms: worked + performance.now() - begin, frame_ms: null };
  queueMicrotask(() => {
    row.ms = worked + performance.now() - begin; // uPlot draws in a microtask of its own
  });
  times.push(row);
  if (times.length > KEPT) times.splice(0, KEPT / 2);
  const channel = new MessageChannel();
  channel.port1.onmessage = () => {
    row.frame_ms = worked + performance.now() - begin;
    channel.port1.close();
  };
  requestAnimationFrame(() => channel.port2.postMessage(null));
}
