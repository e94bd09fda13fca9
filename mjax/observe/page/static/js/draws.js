/**
 * Schedule the drawing of pictures, and measure its time.
 *
 * Input: functions that draw, each with its view, and the kind of each change (zoom, pan,
 * hover, pick, live, first). Output: at most one call of each function per frame, and
 * `window.mjaxDrawTimes`, a list of {view, kind, ms, frame_ms}. `ms` is the time of the
 * function and of its preparation (`work`). `frame_ms` ends when the browser has painted the
 * frame and runs tasks again, so it includes rasterisation.
 */

const KEPT = 20_000;
const times = [];
window.mjaxDrawTimes = times;
const before = new Map();

/** Call a function, and count its time as part of the next redraw of a view. */
export function work(view, call) {
  const begin = performance.now();
  try {
    return call();
  } finally {
    before.set(view, (before.get(view) ?? 0) + performance.now() - begin);
  }
}

/** Return a function of a kind of change; its calls in one frame cause a single `draw`. */
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
