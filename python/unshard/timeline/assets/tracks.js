// All ranks' tracks under one time axis.
const labelWidth = 118, axisHeight = 20, rowHeight = 17, rankGap = 8;
const WIDTH_OF_SPAN = 6;       // numbers a span: begin, duration, name, of, bytes, lane

// Each track's spans in sub-rows, so that none hides another: a span goes below those that contain it (or run at the same time).
const layout = data.ranks.map(rank => rank.tracks.map(track => {
  const ends = [], count = track.spans.length / WIDTH_OF_SPAN, rows = new Uint8Array(count);
  for (let i = 0; i < count; ++i) {
    const begin = track.spans[i * WIDTH_OF_SPAN];
    let row = ends.findIndex(end => end <= begin + 0.2);
    if (row < 0) row = ends.length < 3 ? ends.length : 2;
    rows[i] = row;
    ends[row] = begin + track.spans[i * WIDTH_OF_SPAN + 1];
  }
  return {name: track.name, spans: track.spans, count, rows, depth: Math.max(1, ends.length), longest: longestSpan(track.spans)};
}));

function longestSpan(spans) {
  let most = 0;
  for (let i = 1; i < spans.length; i += WIDTH_OF_SPAN) most = Math.max(most, spans[i]);
  return most;
}

function tracksHeight() {
  return axisHeight + layout.reduce((sum, tracks) => sum + rankGap + 15 + tracks.reduce((rows, track) => rows + track.depth, 0) * rowHeight, 0);
}

// The first span that can still be seen at `time`.
function firstFrom(track, time) {
  let low = 0, high = track.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (track.spans[middle * WIDTH_OF_SPAN] < time - track.longest) low = middle + 1; else high = middle;
  }
  return low;
}

function colourOf(lane, name) {
  if (lane === "compute") return name === "backward" ? palette.backward : palette.compute;
  return palette[lane] || palette.other;
}

function drawAxis(context, width, height, view) {
  const span = view.end - view.begin, scale = (width - labelWidth) / span;
  const wanted = span / Math.max(2, (width - labelWidth) / 110), power = 10 ** Math.floor(Math.log10(wanted));
  const unit = [1, 2, 5, 10].map(n => n * power).find(n => n >= wanted);
  context.strokeStyle = palette.line;
  context.fillStyle = palette.faint;
  context.lineWidth = 1;
  for (let time = Math.ceil(view.begin / unit) * unit; time < view.end; time += unit) {
    const x = Math.round(labelWidth + (time - view.begin) * scale) + 0.5;
    context.beginPath();
    context.moveTo(x, axisHeight - 4);
    context.lineTo(x, height);
    context.stroke();
    const inUnit = unit >= 1e6 ? (time / 1e6).toFixed(unit % 1e6 ? 1 : 0) + " s" : +(time / 1e3).toFixed(3) + " ms";
    if (x + 3 + context.measureText(inUnit).width <= width) context.fillText(inUnit, x + 3, axisHeight / 2);
  }
}

function drawStepMarks(context, rank, y, height, view, scale) {
  for (const row of rank.steps) {
    if (row[2] < view.begin || row[1] > view.end) continue;
    const x = labelWidth + Math.max(0, (row[1] - view.begin) * scale), right = labelWidth + (Math.min(row[2], view.end) - view.begin) * scale;
    context.fillStyle = palette.band;
    context.fillRect(x, y, Math.max(1, right - x - 1), height);
    context.fillStyle = palette.faint;
    fitText(context, `step ${row[0]} · ${msText(row[2] - row[1])}`, x + 4, y + 8, right - x - 6);
  }
}

function drawTracks(view) {
  const height = tracksHeight(), [context, width] = fit(element("tracks"), height), scale = (width - labelWidth) / (view.end - view.begin);
  let y = axisHeight;
  data.ranks.forEach((rank, index) => {
    y += rankGap;
    const rows = layout[index].reduce((sum, track) => sum + track.depth, 0);
    context.save();
    context.beginPath();
    context.rect(labelWidth, 0, width - labelWidth, height);
    context.clip();
    drawStepMarks(context, rank, y, 15 + rows * rowHeight, view, scale);
    context.restore();
    context.fillStyle = palette.ink;
    fitText(context, `rank ${rank.rank} (${rank.host})`, 0, y + 8, labelWidth - 8);
    y += 15 + rows * rowHeight;
  });
  drawAxis(context, width, height, view);
  const hits = [];
  y = axisHeight;
  data.ranks.forEach((rank, index) => {
    y += rankGap + 15;
    for (const track of layout[index]) {
      context.fillStyle = palette.faint;
      context.fillText(track.name, 10, y + rowHeight / 2);
      drawSpans(context, track, y, width, view, scale);
      hits.push({track, top: y, bottom: y + track.depth * rowHeight, rank});
      y += track.depth * rowHeight;
    }
  });
  return hits;
}

// Spans narrower than a pixel are drawn once a pixel.
function drawSpans(context, track, top, width, view, scale) {
  const last = [-1, -1, -1];
  context.save();
  context.beginPath();
  context.rect(labelWidth, top, width - labelWidth, track.depth * rowHeight);
  context.clip();
  for (let i = firstFrom(track, view.begin); i < track.count; ++i) {
    const at = i * WIDTH_OF_SPAN, begin = track.spans[at], duration = track.spans[at + 1];
    if (begin > view.end) break;
    const x = labelWidth + (begin - view.begin) * scale, w = Math.max(1, duration * scale), row = track.rows[i];
    if (x + w < labelWidth || (w <= 1 && Math.floor(x) <= last[row])) continue;
    last[row] = Math.floor(x + w);
    const lane = data.texts[track.spans[at + 5]], name = data.texts[track.spans[at + 2]];
    context.fillStyle = colourOf(lane, name);
    context.fillRect(x, top + row * rowHeight + 1, w > 3 ? w - 0.6 : w, rowHeight - 2);
    if (w < 26) continue;
    context.fillStyle = inkOn(context.fillStyle);
    const of = data.texts[track.spans[at + 3]], left = Math.max(x, labelWidth);
    fitText(context, of && lane !== "collective" ? of : name, left + 4, top + row * rowHeight + rowHeight / 2 + 0.5, x + w - left - 6);
  }
  context.restore();
}

// What is under the pointer, in words; a span narrower than three pixels can still be hit.
function spanText(hits, x, y, view, width) {
  const hit = hits.find(h => y >= h.top && y < h.bottom);
  if (!hit || x < labelWidth) return "";
  const perPixel = (view.end - view.begin) / (width - labelWidth), time = view.begin + (x - labelWidth) * perPixel;
  const row = Math.floor((y - hit.top) / rowHeight);
  let best = -1, nearest = Infinity;
  for (let i = firstFrom(hit.track, time - 2 * perPixel); i < hit.track.count; ++i) {
    const begin = hit.track.spans[i * WIDTH_OF_SPAN], end = begin + hit.track.spans[i * WIDTH_OF_SPAN + 1];
    if (begin > time + 2 * perPixel) break;
    const away = time < begin ? begin - time : time > end ? time - end : 0;
    if (hit.track.rows[i] === row && away <= 2 * perPixel && away <= nearest) nearest = away, best = i * WIDTH_OF_SPAN;
  }
  if (best < 0) return "";
  const [begin, duration, name, of, bytes, lane] = hit.track.spans.slice(best, best + WIDTH_OF_SPAN);
  const lines = [`${data.texts[name]} (${data.texts[lane]}): ${msText(duration)}`];
  if (of) lines.push(data.texts[of]);
  if (bytes > 0) lines.push(bytesText(bytes) + (bytes >= 1e5 && duration > 0 ? `, ${(bytes / duration / 1e3).toFixed(2)} GB/s` : ""));
  lines.push(`rank ${hit.rank.rank}, at ${msText(begin)}`);
  return lines.join("\n");
}
