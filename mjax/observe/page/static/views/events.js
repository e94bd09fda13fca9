/**
 * Events: what happened to the run, the newest first, by severity, host and text.
 *
 * Input: pages of /api/events, new events from the stream, and the part run of the store.
 * Output: the problems of the records, and a table of events. Its texts come from logs and
 * are shown as text only.
 */

import { get } from "../js/api.js";
import { choice, el, empty, fill, say, setOptions, table } from "../js/dom.js";
import { redrawer } from "../js/draws.js";
import { clock, count, plural } from "../js/format.js";
import { problemList } from "./ledger.js";

const PAGE = 1000;
const KEPT = 20_000;
const SHOWN = 300; // more rows than anybody reads, drawn within a few ms
/** Sign and word of each severity. */
export const SIGNS = { error: "■ error", warning: "▲ warning", info: "○ info" };

/** Return the events that match {severities, host, text}, the newest first. Pure. */
export function choose(events, { severities, host, text }) {
  const needle = text.trim().toLowerCase();
  return events
    .filter(
      (each) =>
        severities.has(each.severity) &&
        (!host || each.host === host) &&
        (!needle ||
          `${each.kind} ${each.text} ${each.host} ${each.rank}`.toLowerCase().includes(needle)),
    )
    .reverse();
}

/** Make the view. */
export function make({ store }) {
  const wanted = { severities: new Set(["error", "warning", "info"]), host: "", text: "" };
  let events = [];
  let next = 0;
  let visible = false;
  let problem = null;
  let isLoaded = false;
  const boxes = ["error", "warning", "info"].map((severity) => {
    const box = el("input", {
      type: "checkbox",
      checked: true,
      on: {
        change: () => {
          if (box.checked) wanted.severities.add(severity);
          else wanted.severities.delete(severity);
          draw("pick");
        },
      },
    });
    return el("label", {}, box, el("span", { class: `sev-${severity}` }, SIGNS[severity]));
  });
  const host = choice("Host", [["", "all hosts"]], "", (value) => {
    wanted.host = value;
    draw("pick");
  });
  const text = el("input", {
    type: "search",
    size: "28",
    placeholder: "kind, text, host or rank",
    on: {
      input: () => {
        wanted.text = text.value;
        draw("pick");
      },
    },
  });
  const told = el("p", { class: "muted", role: "status" });
  const body = el("div", {});
  const records = el("div", {});
  const panel = el(
    "section",
    { class: "panel", "aria-label": "Events" },
    el(
      "div",
      { class: "controls" },
      el("fieldset", {}, el("legend", {}, "Severity"), boxes),
      host.box,
      el("label", { class: "field" }, el("span", {}, "Find"), text),
      told,
    ),
    body,
  );
  const element = el("div", {}, records, panel);
  const draw = redrawer("events", () => {
    if (!visible) return false;
    const hosts = [...new Set(events.map((each) => each.host).filter(Boolean))].sort();
    setOptions(host.select, [["", "all hosts"], ...hosts.map((each) => [each, each])], wanted.host);
    const found = choose(events, wanted);
    const run = store.get("run");
    const problems = run?.problems ?? [];
    if (records.childElementCount !== Number(problems.length > 0))
      fill(records, problemList(problems));
    say(
      told,
      !isLoaded
        ? ""
        : found.length > SHOWN
        ? `the newest ${SHOWN} of ${count(found.length)}; narrow the filter for older ones`
        : `${count(found.length)} of ${plural(events.length, "event")}`,
    );
    if (problem) fill(body, el("p", { class: "error" }, problem));
    else if (found.length) fill(body, eventTable(found.slice(0, SHOWN)));
    else if (events.length)
      fill(body, empty("No event matches", "Allow more severities, all hosts, or another text."));
    else if (!isLoaded || !(run?.is_complete || run?.failed))
      fill(body, empty("Loading", "The server is reading the events of the run."));
    else
      fill(
        body,
        empty("No events yet", "Starts, saves, warnings and errors of the run appear here."),
      );
    return true;
  });
  async function load() {
    try {
      for (let more = true; more;) {
        const answer = await get("events", { after: next, limit: PAGE });
        add(answer.events);
        more = answer.events.length > 0 && answer.next > next;
        next = Math.max(next, answer.next);
      }
      problem = null;
      isLoaded = true;
    } catch (error) {
      problem = error.message;
    }
    draw("live");
  }
  function add(rows) {
    const last = events.at(-1)?.i ?? -1;
    events = events.concat(rows.filter((each) => each.i > last)).slice(-KEPT);
  }
  store.on(["newEvents"], load);
  store.on(["run"], () => {
    fill(records);
    draw("live");
  });
  return {
    element,
    show() {
      visible = true;
      draw("first");
      load();
    },
    hide() {
      visible = false;
    },
  };
}

function eventTable(events) {
  return table(
    "Events, the newest first",
    [
      { head: "time", class: "time", cell: (row) => clock(row.time_ns) },
      {
        head: "severity",
        class: "sev",
        cell: (row) =>
          el("span", { class: `sev-${row.severity}` }, SIGNS[row.severity] ?? row.severity),
      },
      { head: "start", num: true, cell: (row) => row.generation ?? "–" },
      { head: "rank", num: true, cell: (row) => row.rank ?? "–" },
      { head: "host", cell: (row) => row.host ?? "–" },
      { head: "kind", cell: (row) => row.kind },
      { head: "text", class: "wide", cell: (row) => row.text },
    ],
    events,
  );
}
