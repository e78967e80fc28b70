"""A user without a mouse: everything is reachable with Tab, and the focus is visible."""

from __future__ import annotations

from typing import Any

MOST_TABS = 80
NAME_OF_FOCUSED = """() => {
  const e = document.activeElement;
  const label = e.id && document.querySelector(`label[for="${e.id}"]`);
  const names = [e.getAttribute('aria-label'), label?.innerText, e.placeholder, e.innerText];
  return (names.find(Boolean) ?? '').trim();
}"""
LOOKS = """() => {
  const style = getComputedStyle(document.activeElement);
  const borders = [style.outline, style.boxShadow, style.borderColor, style.backgroundColor];
  return borders.join('|');
}"""


def tab_to(page: Any, name: str, backwards: bool = False) -> None:
    """Press Tab until the element with this name has the focus."""
    seen = []
    for _ in range(MOST_TABS):
        page.keyboard.press("Shift+Tab" if backwards else "Tab")
        seen.append(str(page.evaluate(NAME_OF_FOCUSED)))
        if seen[-1] == name:
            return
    raise AssertionError(f"Tab never comes to {name!r}: {seen}")


def is_focus_seen(page: Any) -> bool:
    """Return whether the focused element looks different from its unfocused state."""
    page.wait_for_timeout(400)  # a ring may grow
    focused = page.evaluate(LOOKS)
    element = page.evaluate_handle("document.activeElement")
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(400)
    plain = element.evaluate(LOOKS.replace("document.activeElement", "e").replace("()", "(e)", 1))
    element.evaluate("(e) => e.focus({focusVisible: true})")
    return bool(focused != plain)
