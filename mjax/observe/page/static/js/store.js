/**
 * The page's copy of the run's data, and the listeners to its changes.
 *
 * Input: parts of the run by name: run, metrics, state, stragglers, stuck, ledger, whatif,
 * events. Output: calls of the listeners to a part, with its value and its name.
 */

/** Make an empty store. */
export function makeStore() {
  const parts = new Map();
  const listeners = new Map();
  return {
    /** The part, or null if it is not known yet. */
    get: (name) => parts.get(name) ?? null,
    /** Replace a part. */
    set(name, value) {
      parts.set(name, value);
      for (const listener of listeners.get(name) ?? []) listener(value, name);
    },
    /** Call `listener` whenever one of these parts changes. */
    on(names, listener) {
      for (const name of names) {
        if (!listeners.has(name)) listeners.set(name, new Set());
        listeners.get(name).add(listener);
      }
    },
  };
}

/** Replace the marks from a step on by those of {from, marks, num_marks}. */
export function appendMarks(metrics, news) {
  const old = (metrics.marks ?? []).filter((mark) => mark.step < news.from);
  return { ...metrics, marks: old.concat(news.marks), num_marks: news.num_marks };
}

/** Append rows to columns of metrics; they replace all rows from their first step on. */
export function appendMetrics(metrics, rows) {
  const steps = [...metrics.steps];
  const columns = {};
  const names = new Set([...Object.keys(metrics.columns), ...Object.keys(rows.columns)]);
  const first = rows.steps.length ? rows.steps[0] : Infinity;
  let keep = steps.length;
  while (keep > 0 && steps[keep - 1] >= first) keep -= 1;
  for (const name of names) {
    const old = metrics.columns[name] ?? new Array(steps.length).fill(null);
    const more = rows.columns[name] ?? new Array(rows.steps.length).fill(null);
    columns[name] = old.slice(0, keep).concat(more);
  }
  return { ...metrics, steps: steps.slice(0, keep).concat(rows.steps), columns };
}
