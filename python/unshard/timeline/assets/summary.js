// The strips (a column a step, stacked by where the time went) and the table of means.
const stripHeight = data.ranks.length > 4 ? 34 : data.ranks.length > 2 ? 48 : 64;
const stepRows = data.ranks.map(rank => new Map(rank.steps.map(row => [row[0], row])));
const longest = longestStep();

// The highest column: the longest step but for the first, which warms up and is cut off.
function longestStep() {
  const all = data.ranks.flatMap(rank => rank.steps.slice(rank.steps.length > 2 ? 1 : 0).map(row => row[2] - row[1]));
  return Math.max(1, ...all);
}

function drawLegend() {
  element("legend").innerHTML = data.kinds.map(kind => `<span><i style="background:${palette[kind]}"></i>${kindNames[kind]}</span>`).join("");
}

function makeStrips(onStep) {
  element("scale").textContent = `a column a step, full height ${msText(longest)}`;
  data.ranks.forEach((rank, index) => {
    const row = document.createElement("div"), label = document.createElement("label"), holder = document.createElement("div");
    const canvas = document.createElement("canvas");
    row.className = "strip";
    const host = document.createElement("small");
    host.textContent = rank.host;
    label.append(`rank ${rank.rank}`, host);
    label.title = `rank ${rank.rank} on ${rank.host}`;
    holder.append(canvas);
    row.append(label, holder);
    element("strips").append(row);
    canvas.addEventListener("mousemove", event => showTip(event, stripText(index, stepAt(canvas, event))));
    canvas.addEventListener("mouseleave", event => showTip(event, ""));
    canvas.addEventListener("click", event => onStep(stepAt(canvas, event)));
  });
}

function stepAt(canvas, event) {
  const box = canvas.getBoundingClientRect(), width = columnWidth(box.width);
  return data.steps[Math.min(data.steps.length - 1, Math.max(0, Math.floor((event.clientX - box.left) / width)))];
}

function columnWidth(whole) {
  return Math.min(44, whole / Math.max(1, data.steps.length));
}

function stripText(index, step) {
  if (step === undefined) return "";
  const row = stepRows[index].get(step);
  if (!row) return `step ${step}: not recorded on rank ${data.ranks[index].rank}`;
  return `rank ${data.ranks[index].rank}, step ${step}: ${msText(row[2] - row[1])}\n` +
    data.kinds.map((kind, k) => `${msText(row[3 + k])} ${kindNames[kind]}`).join("\n");
}

function drawStrips(selected) {
  document.querySelectorAll(".strip canvas").forEach((canvas, index) => {
    const [context, whole] = fit(canvas, stripHeight), width = columnWidth(whole), gap = width > 7 ? 1 : 0;
    data.steps.forEach((step, column) => {
      if (step === selected) {
        context.fillStyle = palette.band;
        context.fillRect(column * width, 0, width, stripHeight);
      }
      const row = stepRows[index].get(step);
      if (!row) return;
      let y = stripHeight - 3;
      data.kinds.forEach((kind, k) => {
        const height = Math.min(row[3 + k] / longest * (stripHeight - 5), y);
        context.fillStyle = palette[kind];
        context.fillRect(column * width, y - height, width - gap, height);
        y -= height;
      });
      if (step === selected) {
        context.fillStyle = palette.ink;
        context.fillRect(column * width, stripHeight - 2, width - gap, 2);
      }
    });
  });
}

function makeTotals() {
  const short = {compute: "compute", gather: "gathers", reduce: "reduction", update: "update", other: "outside"};
  const head = ["rank", "ms a step", ...data.kinds.map(kind => short[kind]), "RSS after steps"];
  const rows = data.ranks.map(rank => {
    const share = kind => `${rank.mean[kind].toFixed(1)} <small>${rank.mean.step > 0 ? (100 * rank.mean[kind] / rank.mean.step).toFixed(0) : 0} %</small>`;
    return [`rank ${rank.rank}`, rank.mean.step.toFixed(1), ...data.kinds.map(share), rank.peak];
  });
  element("totals").innerHTML = `<tr>${head.map((text, i) => `<th title="${i > 1 && i < 7 ? kindNames[data.kinds[i - 2]] : ""}">${text}</th>`).join("")}</tr>` +
    rows.map(cells => `<tr>${cells.map(text => `<td>${text}</td>`).join("")}</tr>`).join("");
}
