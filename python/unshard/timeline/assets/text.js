// Shared by all parts: the data, colours, numbers as text, canvases at the screen's own resolution.
const data = JSON.parse(document.getElementById("data").textContent);
const element = id => document.getElementById(id);
const kindNames = {compute: "compute", gather: "gather waits", reduce: "reduction waits", update: "update", other: "outside the engine"};

let palette = {};
function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["page", "card", "ink", "faint", "line", "band", "compute", "gather", "reduce", "update", "other", "prefetch", "bucket",
    "collective", "backward"];
  palette = Object.fromEntries(names.map(name => [name, style.getPropertyValue("--" + name).trim()]));
}

// Black or white, whichever can be read on `colour` (#rrggbb).
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
  return 0.3 * red + 0.59 * green + 0.11 * blue > 150 ? "#16191c" : "#ffffff";
}

function msText(us) {
  const ms = us / 1000;
  if (ms >= 10000) return (ms / 1000).toFixed(1) + " s";
  return ms >= 100 ? ms.toFixed(0) + " ms" : ms >= 1 ? ms.toFixed(1) + " ms" : ms.toFixed(3) + " ms";
}

function bytesText(bytes) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (bytes >= size) return (bytes / size).toFixed(1) + " " + unit;
  return bytes + " bytes";
}

// A context whose unit is a CSS pixel. Browsers show nothing of a canvas that is too large: tracks of many ranks get fewer pixels instead.
const mostPixelsHigh = 32000, mostPixels = 120e6;
function fit(canvas, height) {
  const width = canvas.parentElement.clientWidth;
  const ratio = Math.min(window.devicePixelRatio || 1, mostPixelsHigh / height, Math.sqrt(mostPixels / Math.max(1, width * height)));
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  context.textBaseline = "middle";
  return [context, width];
}

// `text` from its start as far as `width` has room, or nothing.
function fitText(context, text, x, y, width) {
  if (width < 14) return;
  let shown = text;
  if (context.measureText(text).width > width) {
    let low = 0, high = text.length;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (context.measureText(text.slice(0, middle) + "…").width <= width) low = middle; else high = middle - 1;
    }
    if (low < 2) return;
    shown = text.slice(0, low) + "…";
  }
  context.fillText(shown, x, y);
}

function showTip(event, text) {
  const tip = element("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, window.innerWidth - box.width - 8)) + "px";
  const below = event.clientY + 18;
  tip.style.top = Math.max(4, below + box.height > window.innerHeight ? event.clientY - box.height - 8 : below) + "px";
}
