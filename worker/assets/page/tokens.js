// Tokens coloured by their probability, with the alternatives in a box beside the pointer or focus.

function grade(probability) {
  return probability > 0.9 ? "p4" : probability > 0.5 ? "p3" : probability > 0.1 ? "p2" : "p1";
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

let box = null;

function showAlternatives(token, entry) {
  hideAlternatives();
  box = document.createElement("div");
  box.id = "alternatives";
  box.setAttribute("role", "tooltip");
  for (const each of entry.top_logprobs.length > 0 ? entry.top_logprobs : [entry]) {
    const line = document.createElement("div");
    line.textContent = `${JSON.stringify(each.token)} ${percent(each.logprob)}`;
    box.append(line);
  }
  const place = token.getBoundingClientRect();
  document.body.append(box);
  box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - box.offsetWidth - 4))}px`;
  const below = place.bottom + 6;
  box.style.top = `${below + box.offsetHeight > innerHeight ? place.top - box.offsetHeight - 6 : below}px`;
}

function hideAlternatives() {
  box?.remove();
  box = null;
}

export function append(target, entries) {
  for (const entry of entries) {
    const token = document.createElement("span");
    token.className = `token ${grade(Math.exp(entry.logprob))}`;
    token.textContent = entry.token;
    token.tabIndex = 0;
    for (const name of ["pointerenter", "focus"]) token.addEventListener(name, () => showAlternatives(token, entry));
    for (const name of ["pointerleave", "blur"]) token.addEventListener(name, hideAlternatives);
    target.append(token);
  }
}

// The completions route's own form of log-probabilities, as the chat route's.
export function fromCompletion(logprobs) {
  return (logprobs?.tokens ?? []).map((token, index) => ({
    token,
    logprob: logprobs.token_logprobs[index] ?? 0,
    top_logprobs: Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([text, logprob]) => ({ token: text, logprob })),
  }));
}
