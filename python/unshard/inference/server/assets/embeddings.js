// The server's figures every two seconds, and cosines between texts.
const part = id => document.getElementById(id);

async function refresh() {
  try {
    const response = await fetch("live");
    if (!response.ok) throw new Error();
    const live = await response.json(), figures = live.embeddings;
    part("facts").textContent = `${figures.texts.toLocaleString("en")} texts of ${figures.tokens.toLocaleString("en")} tokens so far, ` +
      `${figures.waiting} requests waiting`;
    part("state").textContent = live.draining ? "shutting down" : "serving";
    part("state").className = "badge " + (live.draining ? "bad" : "good");
  } catch (error) {
    part("state").textContent = "not reachable";
    part("state").className = "badge bad";
  }
  setTimeout(refresh, 2000);
}

function cosine(a, b) {
  let product = 0, one = 0, other = 0;
  for (let i = 0; i < a.length; ++i) {
    product += a[i] * b[i];
    one += a[i] * a[i];
    other += b[i] * b[i];
  }
  return product / Math.sqrt(one * other);
}

part("form").addEventListener("submit", async event => {
  event.preventDefault();
  const texts = part("texts").value.split("\n").filter(text => text.trim()), began = performance.now(), key = part("key").value;
  const headers = {"Content-Type": "application/json", ...(key ? {Authorization: "Bearer " + key} : {})};
  part("output").className = part("output").textContent = "";
  try {
    const response = await fetch("v1/embeddings", {method: "POST", headers, body: JSON.stringify({input: texts})});
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error.message);
    const vectors = answer.data.map(each => each.embedding);
    part("output").textContent = texts.map((text, i) => `${cosine(vectors[0], vectors[i]).toFixed(3)}  ${text}`).join("\n");
    part("speed").textContent = `${texts.length} vectors of ${vectors[0].length} numbers, ${answer.usage.prompt_tokens} tokens, in ` +
      `${(performance.now() - began).toFixed(0)} ms`;
  } catch (error) {
    part("output").className = "failed";
    part("output").textContent = error.message;
  }
});
if (matchMedia("(prefers-color-scheme: dark)").matches || location.hash === "#theme=dark") document.documentElement.classList.add("dark");
refresh();
