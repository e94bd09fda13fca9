/**
 * Parts beside the timeline: legend, the chosen span, times by row.
 *
 * Input: a model of timeline_data.js, the chosen span. Output: elements.
 */

import { button, el, fill, table } from "../js/dom.js";
import { count, micros, plural } from "../js/format.js";
import { boundText, colourOf } from "../js/timeline_canvas.js";
import { describe, totals, waitedForBy } from "../js/timeline_data.js";
import { SIGNS } from "./events.js";

const MOST_ROWS = 40;

/** Explain the colours, and show whether arrows are drawn. */
export function showLegend(list, model, drawn) {
  const names = new Map();
  for (let at = 0; at < model.spans.row.length; at += 1) {
    const [name, kind] = [model.names[model.spans.name[at]], model.kinds[model.spans.kind[at]]];
    if (model.rows[model.spans.row[at]].stream === "step") continue;
    const colour = colourOf(name, kind);
    if (!names.has(colour)) names.set(colour, { kind, names: new Set() });
    names.get(colour).names.add(name);
  }
  const items = [...names].map(([colour, { kind, names: own }]) =>
    el(
      "li",
      {},
      el("span", { class: "swatch", style: { "background-color": colour } }),
      own.size === 1 && own.has(kind) ? kind : `${kind}: ${[...own].slice(0, 4).join(", ")}`,
    ),
  );
  if (drawn.of) {
    items.push(
      el(
        "li",
        {},
        drawn.arrows
          ? "→ sent to the next stage; dashed: sent back"
          : `${count(drawn.of)} arrows between stages are hidden here: zoom in, or choose a span`,
      ),
    );
  }
  fill(list, items);
}

/** Show one span, the spans that it waits for, and the spans that wait for it. */
export function showPicked(box, { model, picked, waits }, pick) {
  if (picked === null) {
    fill(
      box,
      el("h2", {}, "No span chosen"),
      el(
        "p",
        { class: "muted" },
        "Click a span, or press ] in the picture, to see its times, the error of its clock " +
          "and the spans that it waits for.",
      ),
    );
    return;
  }
  const one = describe(model, picked);
  const after = waitedForBy(model, picked);
  const pair = (term, text) => [el("dt", {}, term), el("dd", {}, text)];
  fill(
    box,
    el("h2", {}, `${one.name}, ${micros(one.end_us - one.start_us)}`),
    el(
      "dl",
      {},
      pair("rank", `${one.rank} on ${one.host}`),
      pair("stream", one.stream),
      pair("kind", one.kind),
      pair("step", one.step < 0 ? "outside of steps" : count(one.step)),
      pair("from", micros(one.start_us)),
      pair("to", micros(one.end_us)),
      pair("clock", boundText(one.bound_us)),
    ),
    el("h3", {}, "Waits for"),
    waits.length
      ? waits.map((each) => link(model, each.span, each.why, one, pick))
      : el("p", { class: "muted" }, "no such span is recorded"),
    el("h3", {}, "Spans that wait for it"),
    after.length
      ? after.map((span) => link(model, span, "uses what it sends", one, pick))
      : el("p", { class: "muted" }, "no such span is recorded"),
    button("Close", () => pick(null)),
  );
}

function link(model, span, why, own, pick) {
  const one = describe(model, span);
  const late_us = one.end_us - own.start_us;
  return el(
    "p",
    {},
    button(`${one.name} on rank ${one.rank}, ${one.stream}`, () => pick(span), {
      class: "linkish",
    }),
    ` ${why}; ends ${micros(Math.abs(late_us))} ${late_us >= 0 ? "after" : "before"} this one begins`,
  );
}

/** Show times by rank, stream and name, as a text version of the picture. */
export function showTotals(box, model) {
  const rows = totals(model).sort((a, b) => b.total_us - a.total_us);
  const shown = rows.slice(0, MOST_ROWS);
  fill(
    box,
    el("h2", {}, "Times by row"),
    table(
      shown.length < rows.length
        ? `The ${MOST_ROWS} longest of ${plural(rows.length, "row")}`
        : "All spans that are shown, the longest first",
      [
        { head: "rank", num: true, cell: (row) => row.rank },
        { head: "host", cell: (row) => row.host },
        { head: "stream", cell: (row) => row.stream },
        { head: "span", cell: (row) => row.name },
        { head: "kind", cell: (row) => row.kind },
        { head: "number", num: true, cell: (row) => count(row.num) },
        { head: "together", num: true, cell: (row) => micros(row.total_us) },
        { head: "mean", num: true, cell: (row) => micros(row.total_us / row.num) },
        { head: "clock", cell: (row) => boundText(row.bound_us, true) },
      ],
      shown,
    ),
  );
}

/** Describe the span under the pointer, or the chosen one. */
export function showReadout(box, is) {
  const span = is.hovered ?? is.picked;
  if (span === null) {
    fill(
      box,
      el(
        "span",
        { class: "muted" },
        "Point at a span for its time; click it for what it waits for.",
      ),
    );
    return;
  }
  const { spans, rows, names, kinds } = is.model;
  const row = rows[spans.row[span]];
  fill(
    box,
    el("b", {}, names[spans.name[span]]),
    el("span", {}, kinds[spans.kind[span]]),
    el("b", {}, micros(spans.end_us[span] - spans.start_us[span])),
    el("span", {}, `rank ${row.rank} on ${row.host}, ${row.stream}`),
    el("span", {}, spans.step[span] < 0 ? "outside of steps" : `step ${spans.step[span]}`),
  );
}

/** List the events that have signs in the picture. */
export function showMarks(box, marks) {
  if (!marks.length) return fill(box);
  return fill(
    box,
    el(
      "section",
      { class: "panel", "aria-label": "Events in these steps" },
      el("h2", {}, "Events in these steps"),
      table(
        `${plural(marks.length, "event")}; their signs are in the first row of the rank`,
        [
          { head: "at", num: true, cell: (row) => micros(row.time_us) },
          {
            head: "severity",
            cell: (row) =>
              el("span", { class: `sev-${row.severity}` }, SIGNS[row.severity] ?? row.severity),
          },
          { head: "rank", num: true, cell: (row) => row.rank ?? "–" },
          { head: "kind", cell: (row) => row.kind },
          { head: "text", class: "wide", cell: (row) => row.text },
        ],
        marks,
      ),
    ),
  );
}
