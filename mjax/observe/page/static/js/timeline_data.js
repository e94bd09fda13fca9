/**
 * Spans of the timeline by row, and which span waits for which. Pure.
 *
 * Input: the answer of /api/timeline. Output: a model with the spans of each row, sorted by
 * start; the span at a time; the spans that a span waits for, with the reasons; total times.
 */

/** Make the model. Rows get `order`, spans by start, and `reach`, the largest end so far. */
export function model(answer) {
  const { spans } = answer;
  const rows = answer.rows.map((row) => ({ ...row, order: [], reach: null }));
  for (let at = 0; at < spans.row.length; at += 1) rows[spans.row[at]].order.push(at);
  let [begin, end] = [Infinity, -Infinity];
  for (const row of rows) {
    row.order.sort(
      (a, b) => spans.start_us[a] - spans.start_us[b] || spans.end_us[b] - spans.end_us[a],
    );
    row.reach = new Float64Array(row.order.length);
    let most = -Infinity;
    row.order.forEach((at, place) => {
      most = Math.max(most, spans.end_us[at]);
      row.reach[place] = most;
    });
    if (row.order.length)
      [begin, end] = [Math.min(begin, spans.start_us[row.order[0]]), Math.max(end, most)];
  }
  const [from, to] = [new Map(), new Map()];
  for (const [sent, received] of answer.arrows) {
    push(from, sent, received);
    push(to, received, sent);
  }
  if (begin > end) [begin, end] = [0, 1];
  return { ...answer, rows, begin, end, sentTo: from, gotFrom: to, steps: stepTimes(answer, rows) };
}

function push(map, key, value) {
  if (!map.has(key)) map.set(key, []);
  map.get(key).push(value);
}

/** Return [step, start] pairs, from the streams `step` or, without them, from all spans. */
function stepTimes({ spans, rows }) {
  const found = new Map();
  const hasSteps = rows.some((row) => row.stream === "step");
  for (let at = 0; at < spans.row.length; at += 1) {
    if (hasSteps && rows[spans.row[at]].stream !== "step") continue;
    const step = spans.step[at];
    if (step >= 0) found.set(step, Math.min(found.get(step) ?? Infinity, spans.start_us[at]));
  }
  return [...found].sort((a, b) => a[0] - b[0]);
}

/** Return the first index in `order` whose span may end after `from`. */
export function firstFrom(row, from) {
  let [low, high] = [0, row.order.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.reach[middle] < from) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return the shortest span of a row within `slack` of a time; null if there is none. */
export function spanAt({ rows, spans }, index, at, slack) {
  const row = rows[index];
  let best = null;
  for (let place = firstFrom(row, at - slack); place < row.order.length; place += 1) {
    const span = row.order[place];
    if (spans.start_us[span] > at + slack) break;
    if (spans.end_us[span] < at - slack) continue;
    const size = spans.end_us[span] - spans.start_us[span];
    if (best === null || size < spans.end_us[best] - spans.start_us[best]) best = span;
  }
  return best;
}

/** Return the span `distance` places later in the same row; the span itself at an end. */
export function beside({ rows, spans }, span, distance) {
  const { order } = rows[spans.row[span]];
  return order[order.indexOf(span) + distance] ?? span;
}

/** Return the row, name, kind, step and times of a span. */
export function describe(of, span) {
  const { spans, rows, names, kinds } = of;
  const row = rows[spans.row[span]];
  return {
    span,
    row,
    rank: row.rank,
    host: row.host,
    stream: row.stream,
    bound_us: row.bound_us,
    name: names[spans.name[span]],
    kind: kinds[spans.kind[span]],
    step: spans.step[span],
    start_us: spans.start_us[span],
    end_us: spans.end_us[span],
  };
}

/**
 * Return the spans that a span waits for: [{span, why}].
 * Pipeline transfers are the server's arrows. `norm` is a collective of all devices, so all
 * wait for the one that enters it last. `device` is the wait of a host for its own devices,
 * one step behind.
 */
export function waitsFor(of, span) {
  const own = describe(of, span);
  const found = (of.gotFrom.get(span) ?? []).map((each) => ({
    span: each,
    why: "sends what it uses",
  }));
  if (own.name === "norm") {
    const last = latest(of, (each) => each.name === "norm" && each.step === own.step, "start_us");
    if (last !== null && last !== span)
      found.push({ span: last, why: "came last to the reduction" });
  }
  if (own.name === "device" && own.stream === "host") {
    const last = latest(
      of,
      (each) =>
        each.rank === own.rank &&
        each.stream.startsWith("device:") &&
        each.end_us <= own.end_us &&
        each.end_us >= own.start_us,
      "end_us",
    );
    if (last !== null) found.push({ span: last, why: "was the last to end on its devices" });
  }
  return found;
}

function latest(of, fits, key) {
  let best = null;
  for (let at = 0; at < of.spans.row.length; at += 1) {
    if ((best === null || of.spans[key][at] > of.spans[key][best]) && fits(describe(of, at)))
      best = at;
  }
  return best;
}

/** Return the spans that wait for a span according to the arrows. */
export function waitedForBy(of, span) {
  return of.sentTo.get(span) ?? [];
}

/** Return total times by row and name: [{rank, host, stream, name, kind, num, total_us}]. */
export function totals(of) {
  const found = new Map();
  for (let at = 0; at < of.spans.row.length; at += 1) {
    const key = of.spans.row[at] * 4096 + of.spans.name[at];
    const row = found.get(key) ?? { ...describe(of, at), num: 0, total_us: 0 };
    row.num += 1;
    row.total_us += of.spans.end_us[at] - of.spans.start_us[at];
    found.set(key, row);
  }
  return [...found.values()];
}
