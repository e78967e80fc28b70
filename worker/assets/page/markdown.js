// A model's output is hostile: Markdown becomes HTML, and the HTML is sanitised before it is shown.

const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "strong", "em", "del", "code", "pre", "ul", "ol", "li", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "a", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "title", "align"],
  ALLOWED_URI_REGEXP: /^https?:\/\//i,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("rel", "noopener noreferrer nofollow");
  node.setAttribute("target", "_blank");
});

export function render(target, text) {
  target.replaceChildren(DOMPurify.sanitize(marked.parse(text, { async: false }), { ...ALLOWED, RETURN_DOM_FRAGMENT: true }));
}
