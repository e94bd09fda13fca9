/**
 * Live updates from the server: new rows of metrics, events, the state of the ranks.
 *
 * Input: the stream of server-sent events /live. Output: calls of `handlers` by kind of
 * event, and of `onLink(isOpen, text)`. The browser reconnects by itself; the server then
 * continues after the id of the last event.
 */

const CLOSED = 2; // EventSource.CLOSED: the server refused, so the browser does not retry
const ENDED = "▲ no updates: open the URL with its token again";

/**
 * Listen; return a function that stops.
 * handlers: {metrics, marks, events, state, run}, each called with the parsed data.
 */
export function listen(handlers, onLink) {
  const source = new EventSource("live");
  source.addEventListener("open", () => onLink(true));
  source.addEventListener("error", () => onLink(false, source.readyState === CLOSED ? ENDED : ""));
  for (const [kind, handler] of Object.entries(handlers)) {
    source.addEventListener(kind, (message) => handler(JSON.parse(message.data)));
  }
  return () => source.close();
}
