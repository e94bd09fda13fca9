/**
 * Parts around the picture of the groups: the chosen rank, legends, and
 * the ranks that are behind.
 *
 * Input: the answer of /api/rank, or {problem}; the state of views/groups.js. Output:
 * elements; a rank is shown with its position, groups, data flow, last operation, error,
 * stacks and events.
 */

import { gradient } from "../js/colours.js";
import { button, el, fill, table } from "../js/dom.js";
import { clock, count, plural, ranks as sayRanks, seconds } from "../js/format.js";
import { RATIO } from "../js/heat_data.js";
import { SIGNS } from "./events.js";

const EVENTS = 6;
const LINKS = 12; // ranks of a group that are buttons; the others are only counted

/** Show a rank. choose(rank): called to show another rank. */
export function showRank(box, answer, choose, go) {
  if (!answer) {
    fill(
      box,
      el("h2", {}, "No rank chosen"),
      el(
        "p",
        { class: "muted" },
        "Click a cell or type a rank to see its groups, its senders and receivers, its last operation, " +
          "its error and its stacks.",
      ),
    );
    return;
  }
  if (answer.problem) {
    fill(box, el("h2", {}, "No such rank"), el("p", { class: "error" }, answer.problem));
    return;
  }
  const pair = (term, ...text) => [el("dt", {}, term), el("dd", {}, text)];
  const links = (list) => groupLinks(list ?? [], answer.rank, choose);
  const { last } = answer;
  fill(
    box,
    el("h2", {}, `Rank ${answer.rank} on ${answer.host}`),
    answer.error ? el("p", { class: "error" }, answer.error) : null,
    el(
      "dl",
      {},
      pair(
        "last",
        last
          ? `${last.span ?? "nothing"} (${last.kind ?? "–"}), step ${count(last.step)}, ${seconds(last.age_s)} ago`
          : "no span yet",
      ),
      pair("devices", sayRanks(answer.devices ?? [])),
      pair("place", placeOf(answer.coordinates)),
      pair("tp group", links(answer.groups?.tp)),
      pair("dp group", links(answer.groups?.dp)),
      pair("pp group", links(answer.groups?.pp)),
      pair("sends to", links(answer.sends_to)),
      pair("gets from", links(answer.receives_from)),
    ),
    el("h3", {}, "Stacks"),
    answer.stacks
      ? el(
          "pre",
          { tabindex: "0", role: "region", "aria-label": `Stacks of rank ${answer.rank}` },
          answer.stacks,
        )
      : el(
          "p",
          { class: "muted" },
          "None yet. The watchdog writes stacks in a slow step, the launcher when ranks hang.",
        ),
    el("h3", {}, "Events"),
    answer.events?.length
      ? [...answer.events].reverse().slice(0, EVENTS).map(eventLine)
      : el("p", { class: "muted" }, "None for this rank."),
    el(
      "div",
      { class: "controls" },
      button("Is it stuck?", () => go("stuck")),
      button("Close", () => choose(null)),
    ),
  );
}

function eventLine(event) {
  return el(
    "p",
    { class: "event" },
    el("span", { class: `sev-${event.severity}` }, SIGNS[event.severity] ?? event.severity),
    ` ${clock(event.time_ns)} ${event.kind}: ${event.text}`,
  );
}

function groupLinks(list, own, choose) {
  const others = list.filter((rank) => rank !== own);
  if (!others.length) return "nobody else";
  const shown = others.slice(0, LINKS).flatMap((rank, index) => [
    index ? ", " : "",
    button(`${rank}`, () => choose(rank), {
      class: "linkish",
      "aria-label": `rank ${rank}: choose it`,
    }),
  ]);
  return others.length > LINKS ? [...shown, ` and ${count(others.length - LINKS)} more`] : shown;
}

/** Coordinates of one or several devices: "pp 0, tp 0 and 1". Pure. */
export function placeOf(coordinates) {
  const list = Array.isArray(coordinates) ? coordinates : [coordinates ?? {}];
  const axes = Object.keys(list[0] ?? {});
  const told = axes
    .filter((axis) => axis !== "device")
    .map((axis) => `${axis} ${sayRanks(list.map((each) => each[axis]))}`);
  return told.join("; ") || "not known";
}

/** Host of a rank. */
function hostOf(is, rank) {
  return is.run.ranks.find((each) => each.rank === rank)?.host ?? "an unknown host";
}

/** Describe the cell under the pointer, or the chosen one. */
export function showReadout(box, is) {
  const rank = is.cursor === null ? (is.picked?.rank ?? null) : is.made.list[is.cursor].rank;
  if (rank === null) {
    fill(
      box,
      el(
        "span",
        { class: "muted" },
        "Point at a cell for its rank; click it for its groups, data flow, last operation and error.",
      ),
    );
    return;
  }
  const row = is.rows.get(rank);
  const cell = is.cursor === null ? null : is.made.list[is.cursor];
  fill(
    box,
    el("b", {}, `rank ${rank}`),
    el("span", {}, hostOf(is, rank)),
    cell
      ? el(
          "span",
          {},
          `stage ${cell.p}, dp ${cell.d}, tp ${cell.t}` +
            (cell.device === null ? "" : `, device ${cell.device}`),
        )
      : null,
    row ? el("span", {}, `step ${count(row.step)}`) : null,
    row
      ? el("span", {}, `last ${row.span ?? "nothing"}, ${seconds(row.age_s)} ago`)
      : el("span", {}, "no sign of life"),
    el("b", {}, is.state.text(rank)),
  );
}

/** Explain the colours and signs. */
export function showLegend(box, is) {
  const marks = [
    ...new Map([...is.state.marks.values()].map((each) => [each.sign, each])).values(),
  ];
  fill(
    box,
    el("span", {}, is.state.low),
    el("span", { class: "ramp", style: { background: gradient() } }),
    el("span", {}, is.state.high),
    el(
      "span",
      {},
      el("span", { class: "swatch", style: { background: "var(--none)" } }),
      " no value",
    ),
    marks.map((mark) => el("span", {}, el("b", { class: mark.name }, mark.sign), ` ${mark.says}`)),
    is.state.name === "phase"
      ? el("span", {}, `scale ${RATIO[0]} to ${RATIO[1]} of the median`)
      : null,
  );
}

/** Explain the outlines and arrows. */
export function showLines(list, is) {
  if (!is.picked) {
    fill(
      list,
      el(
        "li",
        {},
        `${plural(is.made.list.length, "device")}: columns are pipeline stages, rows data parallel, cells side by side ` +
          "tensor parallel; a frame holds the devices of one process",
      ),
    );
    return;
  }
  const key = (name, style, text) =>
    el(
      "li",
      {},
      el("span", { class: `line-key ${style}`, style: { "border-color": `var(--${name})` } }),
      text,
    );
  fill(
    list,
    key("text", "", `rank ${is.picked.rank}`),
    key("accent", "", "its tp group"),
    key("third", "dotted", "its dp group"),
    key(
      "second",
      "dashed",
      "its pp group; → activations to the next stage, dashed: gradients back",
    ),
  );
}

/** List the ranks furthest behind, as a text version of the picture. */
export function showBehind(box, is, choose) {
  const first = Math.max(...[...is.rows.values()].map((each) => each.step));
  const rows = [...is.rows.values()]
    .filter((each) => each.ended === null)
    .sort((a, b) => a.step - b.step || b.age_s - a.age_s)
    .slice(0, 8);
  fill(
    box,
    el("h2", {}, "Ranks furthest behind"),
    rows.length
      ? table(
          `Of ${plural(is.rows.size, "rank")}; the first is at step ${count(first)}`,
          [
            {
              head: "rank",
              num: true,
              cell: (row) =>
                button(`${row.rank}`, () => choose(row.rank), {
                  class: "linkish",
                  "aria-label": `rank ${row.rank}: choose it`,
                }),
            },
            { head: "host", cell: (row) => hostOf(is, row.rank) },
            { head: "step", num: true, cell: (row) => count(row.step) },
            { head: "behind", num: true, cell: (row) => plural(first - row.step, "step") },
            { head: "last span", cell: (row) => row.span ?? "–" },
            { head: "age", num: true, cell: (row) => seconds(row.age_s) },
          ],
          rows,
        )
      : el("p", { class: "muted" }, "No rank is running."),
  );
}
