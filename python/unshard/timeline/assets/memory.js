// One kind of memory over time, a line a rank.
const modelState = "model state", modelParts = ["parameters at rest", "gathered parameters", "gradients", "optimizer"];
const memoryHeight = 112;

// The value a curve has from `time` on is that of the last point before it. The sum of several curves changes where one of them does.
function sumOf(memory, names) {
  const changes = [];
  names.forEach(name => {
    const points = memory[name] || [];
    for (let i = 0; i < points.length; i += 2) changes.push([points[i], name, points[i + 1]]);
  });
  changes.sort((a, b) => a[0] - b[0]);
  const current = {}, points = [];
  for (const [time, name, value] of changes) {
    current[name] = value;
    const sum = Object.values(current).reduce((a, b) => a + b, 0);
    if (points.length && points[points.length - 2] === time) points[points.length - 1] = sum;
    else points.push(time, sum);
  }
  return points;
}

const curves = data.ranks.map(rank => ({[modelState]: sumOf(rank.memory, modelParts), ...rank.memory}));

function makeCounters(onChange) {
  const names = [...new Set(curves.flatMap(Object.keys))];
  element("counter").replaceChildren(...names.map(name => new Option(name)));
  element("counter").addEventListener("change", onChange);
}

function rankColour(index) {
  const hues = [212, 22, 145, 275, 340, 50, 185, 100];
  const dark = document.documentElement.classList.contains("dark"), count = data.ranks.length;
  return `hsl(${count > hues.length ? 360 * index / count : hues[index]}, 62%, ${dark ? 64 : 45}%)`;
}

function valueAt(points, time) {
  let low = 0, high = points.length / 2;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[2 * middle] <= time) low = middle + 1; else high = middle;
  }
  return low > 0 ? points[2 * low - 1] : 0;
}

function drawMemory(view) {
  const [context, width] = fit(element("memory"), memoryHeight), name = element("counter").value;
  const shown = curves.map(curve => curve[name] || []);
  const most = Math.max(1, ...shown.map(points => points.reduce((m, value, i) => i % 2 ? Math.max(m, value) : m, 0)));
  const scale = (width - labelWidth) / (view.end - view.begin), top = 8, room = memoryHeight - top - 4;
  const y = value => top + room * (1 - value / most);
  context.strokeStyle = palette.line;
  context.fillStyle = palette.faint;
  for (const part of [0, 0.5, 1]) {
    context.beginPath();
    context.moveTo(labelWidth, Math.round(y(most * part)) + 0.5);
    context.lineTo(width, Math.round(y(most * part)) + 0.5);
    context.stroke();
    context.fillText(part ? bytesText(Math.round(most * part)) : "0", 10, Math.min(y(most * part), memoryHeight - 7));
  }
  context.save();
  context.beginPath();
  context.rect(labelWidth, 0, width - labelWidth, memoryHeight);
  context.clip();
  shown.forEach((points, index) => drawCurve(context, points, rankColour(index), index, view, scale, width, y));
  context.restore();
  element("memoryLegend").innerHTML = data.ranks.map((rank, i) => `<span><i style="background:${rankColour(i)}"></i>rank ${rank.rank}</span>`).join("");
}

function drawCurve(context, points, colour, index, view, scale, width, y) {
  if (!points.length) return;
  context.strokeStyle = colour;
  context.lineWidth = 1.6;
  context.setLineDash(index % 2 ? [5, 3] : []);     // equal curves stay both visible
  context.beginPath();
  let level = y(valueAt(points, view.begin));
  context.moveTo(labelWidth, level);
  for (let i = 0; i < points.length; i += 2) {
    if (points[i] < view.begin) continue;
    if (points[i] > view.end) break;
    const x = labelWidth + (points[i] - view.begin) * scale;
    context.lineTo(x, level);
    level = y(points[i + 1]);
    context.lineTo(x, level);
  }
  context.lineTo(width, level);
  context.stroke();
  context.setLineDash([]);
}

function memoryText(x, view, width) {
  if (x < labelWidth) return "";
  const time = view.begin + (x - labelWidth) * (view.end - view.begin) / (width - labelWidth), name = element("counter").value;
  return `${name} at ${msText(time)}\n` + data.ranks.map((rank, i) => `rank ${rank.rank}: ${bytesText(valueAt(curves[i][name] || [], time))}`).join("\n");
}
