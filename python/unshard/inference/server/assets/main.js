// The server's figures once a second, and the prompt box.
const part = id => document.getElementById(id);
const history = {throughput: [], requests: [], cache: []};
let before = null, running = null;

function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? (value * 1000).toFixed(value < 0.1 ? 1 : 0) + " ms" : value.toFixed(2) + " s";
}

function number(value) {
  return value >= 100 || value === 0 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

function keep(name, at, values) {
  const points = history[name];
  points.push({at, values});
  while (points.length && points[0].at < at - SECONDS) points.shift();
}

function showFigures(live) {
  const at = live.uptime_s, gap = before ? at - before.uptime_s : 0;
  if (gap < 0) Object.values(history).forEach(points => points.length = 0);      // the server was started anew
  if (gap > 0) {
    const generated = (live.generated_tokens - before.generated_tokens) / gap, prompted = (live.prompt_tokens - before.prompt_tokens) / gap;
    keep("throughput", at, [generated, prompted]);
    part("generated").textContent = number(generated);
    part("prompted").textContent = number(prompted) + " of prompts";
  }
  before = live;
  keep("requests", at, [live.running, live.waiting]);
  const share = live.blocks ? 100 * live.blocks_used / live.blocks : 0;
  keep("cache", at, [share]);
  part("running").textContent = live.running;
  part("waiting").textContent = live.waiting + " waiting";
  part("kv").textContent = share.toFixed(share < 10 ? 1 : 0) + " %";
  part("blocks").textContent = `${live.blocks_used.toLocaleString("en")} of ${live.blocks.toLocaleString("en")} blocks of ${live.block_tokens}`;
  part("facts").textContent = `${live.dtype}, KV cache ${live.kv_dtype}, context ${live.context.toLocaleString("en")} tokens` +
    (live.replicas > 1 ? `, ${live.replicas} replicas` : "");
  const rows = [["First token", live.first_token_median, live.first_token_p95], ["Between tokens", live.between_tokens_median, live.between_tokens_p95]];
  part("latency").tBodies[0].replaceChildren(...rows.map(([name, ...values]) => row(name, ...values.map(seconds))),
    row("Finished", "", live.finished.toLocaleString("en")), row("Cancelled", "", live.cancelled.toLocaleString("en")),
    row("Refused", "", live.refused.toLocaleString("en")));
}

function row(...texts) {
  const line = document.createElement("tr");
  for (const text of texts) line.insertCell().textContent = text;
  return line;
}

function draw() {
  if (!before) return;
  drawChart(part("throughput"), history.throughput, before.uptime_s, ["--one", "--two"], 10, top => number(top) + " tok/s");
  drawChart(part("requests"), history.requests, before.uptime_s, ["--one", "--two"], 4, top => String(top));
  drawChart(part("cache"), history.cache, before.uptime_s, ["--one"], 100, () => "100 %");
}

function state(text, kind) {
  part("state").textContent = text;
  part("state").className = "badge " + kind;
}

async function refresh() {
  try {
    const response = await fetch("live");
    if (!response.ok) throw new Error();
    const live = await response.json();
    showFigures(live);
    const failed = live.failed ? `${live.failed} of ${live.replicas} replicas failed` : "";
    state(live.draining ? "shutting down" : failed || "serving", live.draining || failed ? "bad" : "good");
    if (!live.chat && part("kind").value === "chat") {
      part("kind").value = "text";
      part("kind").options[0].disabled = true;
    }
    draw();
  } catch (error) {
    state("not reachable", "bad");
  }
  setTimeout(refresh, 1000);
}

part("form").addEventListener("submit", async event => {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  part("send").disabled = true;
  part("stop").hidden = false;
  const output = part("output"), began = performance.now();
  let first = 0;
  output.className = output.textContent = part("speed").textContent = "";
  const settings = {prompt: part("prompt").value, kind: part("kind").value, most: Number(part("most").value),
                    temperature: Number(part("temperature").value), key: part("key").value};
  try {
    await ask(settings, running.signal, (text, usage) => {
      if (text && !first) first = performance.now();
      const follow = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
      output.append(text);
      if (follow) output.scrollTop = output.scrollHeight;
      if (usage) {
        const all = (performance.now() - began) / 1000, rate = (usage.completion_tokens - 1) / Math.max(all - (first - began) / 1000, 1e-3);
        part("speed").textContent = `${usage.completion_tokens} tokens for a prompt of ${usage.prompt_tokens}; first one after ` +
          `${seconds((first - began) / 1000)}, then ${number(rate)} tokens a second`;
      }
    });
  } catch (error) {
    if (error.name !== "AbortError") {
      output.className = "failed";
      output.append((output.textContent ? "\n" : "") + error.message);
    } else {
      part("speed").textContent = "stopped";
    }
  }
  running = null;
  part("send").disabled = false;
  part("stop").hidden = true;
});
part("stop").addEventListener("click", () => running && running.abort());
part("prompt").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) part("form").requestSubmit();
});
part("theme").addEventListener("click", () => {
  document.documentElement.classList.toggle("dark");
  draw();
});
if (matchMedia("(prefers-color-scheme: dark)").matches || location.hash === "#theme=dark") document.documentElement.classList.add("dark");
window.addEventListener("resize", draw);
refresh();
