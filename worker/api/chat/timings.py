"""llama-server's `timings` and `prompt_progress` of an answer. Pure functions.

llama-swap and others read them in OpenAI's answers, too.
"""

from __future__ import annotations

from worker.api.chat.choice import Choice


def timings(choice: Choice) -> dict[str, float]:
    job, done, progress = choice.job, choice.finished, choice.progress
    n_prompt, n_out = job.prompt_tokens - job.cached_tokens, choice.tokens_out
    prompt_ms = done.prompt_time_ms if done is not None else 0.0
    if done is None and progress is not None:
        n_prompt, prompt_ms = progress.n_computed - job.cached_tokens, progress.seconds * 1000
    elif done is None and not n_out:
        n_prompt = 0
    predicted_ms = done.decode_time_ms if done is not None else job.decode_time_ms
    n_steps = max(n_out - 1, 0)  # the first token comes with the prompt
    return {
        "cache_n": job.cached_tokens,
        "prompt_n": n_prompt,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": round(prompt_ms / n_prompt, 3) if n_prompt else 0.0,
        "prompt_per_second": round(n_prompt * 1000 / prompt_ms, 3) if prompt_ms else 0.0,
        "predicted_n": n_out,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": round(predicted_ms / n_steps, 3) if n_steps else 0.0,
        "predicted_per_second": round(n_steps * 1000 / predicted_ms, 3) if predicted_ms else 0.0,
    }


def prompt_progress(choice: Choice) -> dict[str, float]:
    job, progress = choice.job, choice.progress
    return {
        "total": job.prompt_tokens,
        "cache": job.cached_tokens,
        "processed": progress.n_computed if progress is not None else job.cached_tokens,
        "time_ms": round(progress.seconds * 1000, 3) if progress is not None else 0.0,
    }
