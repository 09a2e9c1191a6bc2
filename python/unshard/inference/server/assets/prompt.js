// One prompt, its answer as it comes.
async function* serverEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function ask(settings, signal, show) {
  const chat = settings.kind === "chat", input = chat ? {messages: [{role: "user", content: settings.prompt}]} : {prompt: settings.prompt};
  const headers = {"Content-Type": "application/json"};
  if (settings.key) headers.Authorization = "Bearer " + settings.key;
  const body = {...input, max_tokens: settings.most, temperature: settings.temperature, stream: true, stream_options: {include_usage: true}};
  const response = await fetch(chat ? "v1/chat/completions" : "v1/completions", {method: "POST", headers, body: JSON.stringify(body), signal});
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of serverEvents(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    show(choice ? (chat ? choice.delta.content : choice.text) || "" : "", event.usage);
  }
}
