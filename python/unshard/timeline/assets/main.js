// The window that is looked at, and what moves it.
const limits = wholeRun();
let view = {...limits}, selected = null, hits = [];

function wholeRun() {
  let begin = Infinity, end = -Infinity;
  for (const rank of data.ranks) {
    for (const row of rank.steps) begin = Math.min(begin, row[1]), end = Math.max(end, row[2]);
    for (const track of rank.tracks) {
      for (let i = 0; i < track.spans.length; i += WIDTH_OF_SPAN) {
        begin = Math.min(begin, track.spans[i]);
        end = Math.max(end, track.spans[i] + track.spans[i + 1]);
      }
    }
  }
  return begin < end ? {begin, end} : {begin: 0, end: 1000};
}

function draw() {
  drawStrips(selected);
  drawWindow();
}

function drawWindow() {
  hits = drawTracks(view);
  drawMemory(view);
  element("window").textContent = `${msText(view.begin)} to ${msText(view.end)} (${msText(view.end - view.begin)})`;
}

function look(begin, end) {
  const size = Math.min(Math.max(end - begin, 5), limits.end - limits.begin);
  const first = Math.min(Math.max(begin, limits.begin), limits.end - size);
  view = {begin: first, end: first + size};
  drawWindow();
}

function selectStep(step) {
  const rows = stepRows.map(rows => rows.get(step)).filter(Boolean);
  selected = rows.length ? step : null;
  element("step").value = selected === null ? "" : String(step);
  drawStrips(selected);
  if (!rows.length) return look(limits.begin, limits.end);
  const begin = Math.min(...rows.map(row => row[1])), end = Math.max(...rows.map(row => row[2])), margin = (end - begin) * 0.02;
  look(begin - margin, end + margin);
}

function moveStep(by) {
  const at = selected === null ? (by > 0 ? -1 : data.steps.length) : data.steps.indexOf(selected);
  const step = data.steps[Math.min(data.steps.length - 1, Math.max(0, at + by))];
  if (step !== undefined) selectStep(step);
}

function zoom(factor, at = (view.begin + view.end) / 2) {
  look(at - (at - view.begin) * factor, at + (view.end - at) * factor);
}

function timeAt(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return view.begin + Math.max(0, event.clientX - box.left - labelWidth) * (view.end - view.begin) / (box.width - labelWidth);
}

function attach(canvas, text) {
  let from = null;
  canvas.addEventListener("wheel", event => {
    if (event.shiftKey) return;                       // the page's own scrolling
    event.preventDefault();
    const size = view.end - view.begin;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) look(view.begin + event.deltaX / 800 * size, view.end + event.deltaX / 800 * size);
    else zoom(Math.exp(event.deltaY / 500), timeAt(canvas, event));
  }, {passive: false});
  canvas.addEventListener("pointerdown", event => {
    from = {x: event.clientX, ...view};
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragging");
  });
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect();
    if (!from) return showTip(event, text(event.clientX - box.left, event.clientY - box.top, box.width));
    const moved = (from.x - event.clientX) * (from.end - from.begin) / (box.width - labelWidth);
    look(from.begin + moved, from.end + moved);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { from = null; canvas.classList.remove("dragging"); });
  canvas.addEventListener("pointerleave", event => showTip(event, ""));
  canvas.addEventListener("dblclick", () => selectStep(undefined));
}

function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  readPalette();
  drawLegend();
  draw();
}

function start() {
  element("step").innerHTML = `<option value="">all steps</option>` + data.steps.map(step => {
    const drawn = !data.shown || data.shown.includes(step);
    return `<option value="${step}">step ${step}${drawn ? "" : " (not drawn)"}</option>`;
  }).join("");
  element("step").addEventListener("change", event => selectStep(event.target.value === "" ? undefined : Number(event.target.value)));
  element("previous").addEventListener("click", () => moveStep(-1));
  element("next").addEventListener("click", () => moveStep(1));
  element("whole").addEventListener("click", () => selectStep(undefined));
  element("closer").addEventListener("click", () => zoom(0.6));
  element("farther").addEventListener("click", () => zoom(1 / 0.6));
  const keys = {ArrowLeft: () => moveStep(-1), ArrowRight: () => moveStep(1), "0": () => selectStep(undefined), "+": () => zoom(0.6),
    "-": () => zoom(1 / 0.6)};
  document.addEventListener("keydown", event => { if (event.target.tagName !== "SELECT" && keys[event.key]) keys[event.key](); });
  element("theme").addEventListener("click", () => setTheme(!document.documentElement.classList.contains("dark")));
  attach(element("tracks"), (x, y, width) => spanText(hits, x, y, view, width));
  attach(element("memory"), (x, y, width) => memoryText(x, view, width));
  makeStrips(selectStep);
  makeTotals();
  makeCounters(drawWindow);
  window.addEventListener("resize", draw);
  const asked = new URLSearchParams(location.hash.slice(1));      // #theme=dark&step=3
  readPalette();
  setTheme(asked.has("theme") ? asked.get("theme") === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  // The page opens on a step of the run's middle: that is what a step looks like once the run is warm.
  const drawn = data.shown || data.steps;
  selectStep(asked.has("step") ? Number(asked.get("step")) : drawn.length > 2 ? drawn[drawn.length >> 1] : undefined);
}

start();
