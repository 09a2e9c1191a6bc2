"use strict";
// Curves of the last two minutes.
const SECONDS = 120;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// points: [{at, values: [..]}], `at` in seconds; one curve a value, the first one filled. top: the least height of the scale.
function drawChart(canvas, points, now, colors, top, label) {
  const box = canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(box.width * scale);
  canvas.height = Math.round(box.height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const height = box.height - 14, ceiling = 13, most = Math.max(top, ...points.flatMap(point => point.values));
  const x = at => box.width * (1 - (now - at) / SECONDS), y = value => ceiling + (height - ceiling) * (1 - value / most);
  pen.strokeStyle = color("--line");
  pen.fillStyle = color("--faint");
  pen.font = "10.5px system-ui, sans-serif";
  pen.beginPath();
  for (const line of [ceiling - 0.5, height + 0.5]) {
    pen.moveTo(0, line);
    pen.lineTo(box.width, line);
  }
  pen.stroke();
  pen.fillText(label(most), 0, ceiling - 3);
  pen.fillText("2 min ago", 0, box.height - 2);
  pen.textAlign = "right";
  pen.fillText("now", box.width, box.height - 2);
  colors.forEach((name, i) => drawCurve(pen, points, x, y, i, color(name), height));
}

function drawCurve(pen, points, x, y, i, stroke, bottom) {
  if (!points.length) return;
  pen.strokeStyle = pen.fillStyle = stroke;
  pen.lineWidth = 1.6;
  pen.beginPath();
  points.forEach((point, k) => pen[k ? "lineTo" : "moveTo"](x(point.at), y(point.values[i])));
  pen.stroke();
  if (i === 0) {
    pen.lineTo(x(points[points.length - 1].at), bottom);
    pen.lineTo(x(points[0].at), bottom);
    pen.globalAlpha = 0.13;
    pen.fill();
    pen.globalAlpha = 1;
  }
}
