/**
 * Ledger: where the wall time of the run went, and what stragglers cost within steps.
 *
 * Input: the parts ledger and whatif of the store. Output: one stacked bar, and tables.
 */

import { el, empty, fill, table } from "../js/dom.js";
import { redrawer } from "../js/draws.js";
import { percent, plural, ranks, seconds } from "../js/format.js";

/** Colour and content of each bucket. Dark text is readable on each colour. */
const BUCKETS = {
  productive: ["#6fc29a", "steps whose work was kept, including their wait for data"],
  compile: ["#c79ae0", "compiling the step, or loading it"],
  restart: ["#9fb4c9", "starting and ending processes, including the first start"],
  lost: ["#ee8a7a", "steps that a later start repeated; time until a hang was noticed"],
  save: ["#e6d15a", "time that saves block the run"],
  eval: ["#6cb0e8", "evaluations and samples"],
  idle: ["#d5dbe1", "no process: waiting for hosts, or between starts"],
  unexplained: ["#f0a860", "no record explains it"],
};
const WORST = 8;
// Smallest cost shown, a fraction of a step; less is noise.
const LEAST = 0.005;

/** Make the view. */
export function make({ store }) {
  const time = el("section", { class: "panel", "aria-label": "Wall time" });
  const cost = el("section", { class: "panel", "aria-label": "Stragglers" });
  const element = el("div", { class: "ledger" }, time, cost);
  let visible = false;
  const draw = redrawer("ledger", () => {
    if (!visible) return false;
    showTime(time, store.get("ledger"));
    showCost(cost, store.get("whatif"));
    return true;
  });
  store.on(["ledger", "whatif"], () => draw("live"));
  return {
    element,
    show() {
      visible = true;
      draw("first");
    },
    hide() {
      visible = false;
    },
  };
}

function showTime(box, found) {
  if (!found || found.problem || !found.wall_s) {
    fill(
      box,
      el("h2", {}, "Wall time"),
      found
        ? empty("No ledger yet", found.problem ?? "No process has written spans.")
        : empty("Loading", "The server is reading the records of the run."),
    );
    return;
  }
  const rows = Object.entries({ ...found.buckets, unexplained: found.unexplained_s }).map(
    ([name, bucket_s]) => ({ name, bucket_s, part: bucket_s / found.wall_s }),
  );
  const drawn = rows.filter((row) => row.bucket_s > 0);
  const largest = Math.max(...rows.map((row) => row.part));
  const told = rows.map((row) => `${row.name} ${percent(row.part)}`).join(", ");
  fill(
    box,
    el(
      "div",
      { class: "head" },
      el(
        "h2",
        {},
        `${percent(found.effective)} of ` + `${seconds(found.wall_s)} was kept training`,
      ),
      el("span", { class: "muted" }, `read from the ${found.source}`),
    ),
    el(
      "div",
      { class: "stack", role: "img", "aria-label": `Wall time: ${told}` },
      drawn.map((row) =>
        el(
          "span",
          {
            class: (row.name === "unexplained" ? "striped" : "") + (row.part < 0.04 ? " thin" : ""),
            title: `${row.name}: ${seconds(row.bucket_s)}, ${percent(row.part, 2)}`,
            style: { width: `${100 * row.part}%`, "background-color": colour(row.name) },
          },
          row.part >= 0.06 ? `${row.name} ${percent(row.part)}` : "",
        ),
      ),
    ),
    table(
      "By bucket; the buckets and the unexplained time add up to the wall time",
      [
        { head: "bucket", cell: (row) => [swatch(row.name), ` ${row.name}`] },
        { head: "time", num: true, cell: (row) => seconds(row.bucket_s) },
        { head: "seconds", num: true, cell: (row) => row.bucket_s.toFixed(1) },
        { head: "share", num: true, cell: (row) => percent(row.part, 2) },
        {
          head: "share, drawn",
          class: "bars",
          cell: (row) =>
            el("span", {
              class: "bar",
              style: {
                width: `${(100 * Math.max(0, row.part)) / largest}%`,
                "background-color": colour(row.name),
              },
            }),
        },
        { head: "content", class: "wide", cell: (row) => (BUCKETS[row.name] ?? ["", ""])[1] },
      ],
      rows,
    ),
    problemList(found.problems),
  );
}

function colour(name) {
  return (BUCKETS[name] ?? BUCKETS.unexplained)[0];
}

function swatch(name) {
  return el("span", {
    class: `swatch${name === "unexplained" ? " striped" : ""}`,
    style: { "background-color": colour(name) },
  });
}

/** Make a list of problems; nothing if there are none. */
export function problemList(problems) {
  return problems?.length
    ? el(
        "ul",
        { class: "problems", "aria-label": "Problems" },
        problems.map((each) => el("li", {}, each)),
      )
    : null;
}

function showCost(box, found) {
  const title = el("h2", {}, "Cost of stragglers in a step");
  if (!found || found.problem) {
    const loading = empty("Loading", "The server is replaying the steps.");
    fill(box, title, found ? empty("Not known", found.problem) : loading);
    return;
  }
  const causes = found.causes.filter((each) => each.saved >= LEAST);
  const workers = [...found.workers].sort((a, b) => b.saved - a.saved).slice(0, WORST);
  fill(
    box,
    title,
    el(
      "p",
      {},
      `Without stragglers a step would take ${seconds(found.even_step_s)} instead of ` +
        `${seconds(found.step_s)}: ${percent(found.stragglers)} less. Steps ${found.steps[0]} to ` +
        `${found.steps[1]}; the replay of the measured times is off by ${percent(found.replay_error)}.`,
    ),
    causes.length
      ? table(
          "Causes, the most expensive first",
          [
            { head: "cause", cell: (row) => row.name },
            { head: "saved without it", num: true, cell: (row) => percent(row.saved) },
            { head: "step without it", num: true, cell: (row) => seconds(row.step_s) },
            { head: "who", class: "wide", cell: (row) => who(row.workers) },
          ],
          causes,
        )
      : el("p", { class: "muted" }, "No single cause costs half a percent of a step."),
    table(
      `The ${workers.length} most expensive of ${plural(found.workers.length, "device")}`,
      [
        { head: "rank", num: true, cell: (row) => row.rank },
        { head: "host", cell: (row) => row.host },
        { head: "stream", cell: (row) => row.stream },
        { head: "saved at the others' speed", num: true, cell: (row) => percent(row.saved, 2) },
      ],
      workers,
    ),
    problemList(found.problems),
  );
}

function who(workers) {
  if (!workers?.length) return "–";
  const hosts = [...new Set(workers.map((each) => each.host))];
  const list = workers.map((each) => each.rank);
  return (
    `rank ${ranks(list)} on ${hosts.slice(0, 4).join(", ")}` +
    (hosts.length > 4 ? ` and ${hosts.length - 4} more` : "")
  );
}
