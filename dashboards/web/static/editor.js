// The editor of SQL: CodeMirror with the names of the log's views and columns.
import {
  acceptCompletion, autocompletion, bracketMatching, closeBrackets, closeBracketsKeymap, completionKeymap, defaultKeymap, drawSelection, EditorView, HighlightStyle, highlightActiveLine,
  highlightActiveLineGutter, history, historyKeymap, ifNotIn, keymap, lineNumbers, moveCompletionSelection, sql, SQLDialect, syntaxHighlighting, tags,
} from "./codemirror.js";

const DUCKDB = SQLDialect.define({
  keywords: "all and any as asc asof between by case cast cross desc describe distinct else end except exclude exists explain filter from full group having in inner intersect is join last lateral "
    + "left like limit not null nulls on or order outer over partition qualify replace right select semi summarize then union using values when where window with",
  types: "bigint blob boolean date double float integer interval smallint timestamp varchar",
  builtin: "abs any_value arg_max arg_min avg coalesce count greatest lag lead least len list lower max median min nullif quantile_cont rank round row_number stddev sum text_of unnest upper",
});
const RESERVED = ["offset", "index"];
const LOOKS = EditorView.theme({
  "&": { backgroundColor: "var(--paper)", border: "1px solid var(--edge)", borderRadius: "5px", fontSize: "14px", margin: "4px 0 8px", resize: "vertical", overflow: "hidden" },
  "&.cm-focused": { outline: "3px solid #e69f00" },
  ".cm-scroller": { fontFamily: 'ui-monospace, "DejaVu Sans Mono", monospace', lineHeight: "1.5", minHeight: "15em", maxHeight: "45vh" },
  ".cm-content": { caretColor: "var(--ink)" },
  ".cm-cursor": { borderLeftColor: "var(--ink)" },
  ".cm-gutters": { backgroundColor: "var(--head)", color: "var(--soft)", borderRight: "1px solid var(--line)" },
  ".cm-activeLine, .cm-activeLineGutter": { backgroundColor: "var(--hover)" },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": { backgroundColor: "var(--pressed)" },
  "&.cm-focused .cm-matchingBracket": { backgroundColor: "var(--chosen)", outline: "1px solid var(--blue)" },
  "&.cm-focused .cm-nonmatchingBracket": { backgroundColor: "var(--alarm)", outline: "1px solid var(--red)" },
  ".cm-tooltip": { backgroundColor: "var(--paper)", color: "var(--ink)", border: "1px solid var(--edge)", borderRadius: "6px" },
  ".cm-tooltip.cm-tooltip-autocomplete > ul": { fontFamily: 'ui-monospace, "DejaVu Sans Mono", monospace', maxWidth: "min(92vw, 700px)" },
  ".cm-tooltip.cm-tooltip-autocomplete > ul > li[aria-selected]": { backgroundColor: "var(--chosen)", color: "var(--ink)", outline: "2px solid var(--blue)", outlineOffset: "-2px" },
  ".cm-completionDetail": { color: "var(--soft)", fontStyle: "normal" },
});
const COLOURS = syntaxHighlighting(HighlightStyle.define([
  { tag: tags.keyword, color: "var(--link)", fontWeight: "bold" },
  { tag: [tags.standard(tags.name), tags.typeName], color: "var(--pink)" },
  { tag: tags.string, color: "var(--green)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--red)" },
  { tag: tags.comment, color: "var(--soft)", fontStyle: "italic" },
]));

const quoteName = (name) => (RESERVED.includes(name) ? `"${name}"` : name);
const toOption = ({ name, type }, view, boost) => ({ label: name, apply: quoteName(name), detail: `${type}, ${view}`, type: "property", boost });

// Columns by their name alone: those of the views that the query names come first.
const completeColumns = (views) => ifNotIn(["String", "LineComment", "BlockComment", "QuotedIdentifier", "."], (context) => {
  const word = context.matchBefore(/[\w.]*/);
  if (word.text.includes(".") || (!word.text && !context.explicit)) return null;
  const named = [...context.state.doc.toString().matchAll(/\b(?:from|join)\s+(\w+)/gi)].map(([, view]) => view);
  const order = [...views.keys()].sort((one, other) => named.includes(other) - named.includes(one));
  const found = new Map();
  for (const view of order) {
    for (const column of views.get(view)) if (!found.has(column.name)) found.set(column.name, toOption(column, view, named.includes(view) ? 2 : -2));
  }
  return { from: word.from, options: [...found.values()], validFor: /^\w*$/ };
});

// Tab takes the chosen name, or the first one; while no names are offered, it leaves the editor.
const acceptName = (view) => acceptCompletion(view) || (moveCompletionSelection(true)(view) && acceptCompletion(view));

// Puts an editor into `place` with the text that is there. `views` has the columns of each view; `run` is called for
// Ctrl+Enter, `changed` after the user has changed the text.
export function openEditor(place, views, run, changed) {
  const schema = Object.fromEntries([...views].map(([view, columns]) => [view, { self: { label: view, detail: "view", type: "type", boost: 1 }, children: columns.map((column) => toOption(column, view, 2)) }]));
  const view = new EditorView({
    doc: place.textContent.trim(),
    extensions: [
      lineNumbers(), highlightActiveLine(), highlightActiveLineGutter(), drawSelection(), history(), bracketMatching(), closeBrackets(), EditorView.lineWrapping, LOOKS, COLOURS,
      sql({ dialect: DUCKDB, schema, upperCaseKeywords: true }), DUCKDB.language.data.of({ autocomplete: completeColumns(views) }),
      autocompletion({ selectOnOpen: false, interactionDelay: 0, icons: false, maxRenderedOptions: 40 }),
      keymap.of([{ key: "Tab", run: acceptName }, { key: "Mod-Enter", run: () => { run(); return true; } }, ...closeBracketsKeymap, ...completionKeymap, ...historyKeymap, ...defaultKeymap]),
      EditorView.contentAttributes.of({ id: "query", "aria-label": "query", spellcheck: "false", autocapitalize: "off" }),
      EditorView.updateListener.of((update) => { if (update.transactions.some((one) => one.isUserEvent("input") || one.isUserEvent("delete"))) changed(); }),
    ],
  });
  place.replaceChildren(view.dom);
  return {
    read: () => view.state.doc.toString(),
    write: (text) => view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: text }, selection: { anchor: 0 } }),
    insert: (name) => { view.dispatch(view.state.replaceSelection(quoteName(name))); view.focus(); },
    show: () => view.dom.scrollIntoView({ block: "nearest" }),
  };
}
