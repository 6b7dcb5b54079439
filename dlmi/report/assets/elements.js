'use strict';
// The script of the page draws the table of all results. Its data stands in the page (`page_data` in page.py):
// side tables, and one list per column. Nothing that a model said is ever parsed as markup: elements
// are made one by one and filled with text.

const data = { targets: [], methods: [], ...JSON.parse(document.getElementById('data').textContent) };
const columns = data.columns;
const DASH = '–';

// ---- Text and elements

const NAMED = { '\n': '⏎', '\t': '⇥', '\r': '␍' };

/** Control, format and bidi characters spelled out, as `dlmi.text.visible` does. */
function visible(text) {
  if (/^[ -~]*$/.test(text)) return text; // most are plain, and this is much faster
  return text.replace(/[\p{C}\p{Z}]/gu, (character) => {
    if (character === ' ') return character;
    if (NAMED[character]) return NAMED[character];
    const hex = character.codePointAt(0).toString(16);
    if (hex.length <= 2) return '\\x' + hex.padStart(2, '0');
    return hex.length <= 4 ? '\\u' + hex.padStart(4, '0') : '\\U' + hex.padStart(8, '0');
  });
}

function make(tag, className, content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (content === undefined) return element;
  for (const part of Array.isArray(content) ? content : [content]) {
    element.append(part instanceof Node ? part : visible(String(part)));
  }
  return element;
}

function drawn(tag, attributes, content) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (content !== undefined) element.textContent = content;
  return element;
}

/** A small bar, filled to a share between 0 and 1. */
function bar(share) {
  const fill = make('span', 'fill');
  fill.style.width = `${100 * share}%`;
  return make('span', 'bar', fill);
}

function button(label, onClick, className) {
  const element = make('button', className, label);
  element.type = 'button';
  element.addEventListener('click', onClick);
  return element;
}

const integers = new Intl.NumberFormat('en-GB', { maximumFractionDigits: 0 });
const decimals = (digits) => (value) => (value === null ? DASH : value.toFixed(digits));
const whole = (value) => (value === null ? DASH : integers.format(value));
const percent = (value) => (value === null ? DASH : `${Math.round(100 * value)}%`);

function compact(value) {
  if (value === null) return DASH;
  if (value >= 1e6) return value.toExponential(1).replace('e+', 'e');
  return value >= 100 ? integers.format(value) : String(Number(value.toPrecision(3)));
}

// ---- What stands in a row

const target = (i) => data.targets[columns.target[i]];
const promptLength = (i) => columns.prompt[i].length;
const tokenPasses = (i) => columns.forward_tokens[i] + columns.backward_tokens[i];
const outputTokens = (i) => columns.output[i] ?? target(i).tokens;
const joined = (tokens) => tokens.map((token) => data.vocabulary[token][1]).join('');
const promptText = (i) => columns.promptText[i] ?? joined(columns.prompt[i]);
const outputText = (i) =>
  (columns.output[i] ? columns.outputText[i] ?? joined(columns.output[i]) : target(i).text);
const isMember = (i, position) => columns.members[i] === '' || columns.members[i][position] === '1';

const column = (name) => (i) => columns[name][i];
const named = (name, table) => (i) => data[table][columns[name][i]];
