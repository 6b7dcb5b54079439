// The table of all results: its columns, filters, order and pages.

const FIELDS = [
  { key: 'id', title: 'Target id', kind: 'words', value: (i) => target(i).id },
  { key: 'k', title: 'k', kind: 'minor', value: (i) => target(i).k },
  { key: 'method', title: 'Method', kind: 'words', value: named('method', 'methods'), cell: methodCell },
  { key: 'n', title: 'N', kind: 'minor', value: promptLength },
  { key: 'seed', title: 'Seed', kind: 'minor', value: column('seed') },
  { key: 'lcs', title: 'Honest LCS', value: column('lcs'), cell: lcsCell },
  { key: 'exact', title: 'Exact', kind: 'minor', value: column('exact'), format: (exact) => (exact ? '✓ yes' : 'no') },
  { key: 'steps', title: 'Steps', kind: 'minor', value: column('steps'), format: whole },
  { key: 'passes', title: 'Token passes', kind: 'minor', value: tokenPasses, format: whole },
  { key: 'seconds', title: 'Seconds', kind: 'minor', value: column('seconds'), format: compact },
  { key: 'perplexity', title: 'Prompt perplexity', kind: 'minor', value: column('prompt_perplexity'), format: compact },
  { key: 'stop', title: 'Stopped', kind: 'words minor', value: named('stop', 'stops') },
  { key: 'target', title: 'Target', kind: 'words said minor', value: (i) => target(i).text, format: (text) => clamped(text.slice(0, CELL_LENGTH)) },
  { key: 'output', title: 'Output', kind: 'words said', value: outputText, cell: markedOutput },
];

// A cell shows two lines; its details show the whole text.
const CELL_LENGTH = 400;

function clamped(content) {
  return make('div', 'clamp', content);
}

/** The method; where there are several groups, over the name of its own. */
function methodCell(i) {
  const label = data.methods[columns.method[i]];
  if (data.groups.length === 1) return label;
  const group = make('div', 'fine', data.groups[columns.group[i]]);
  group.title = group.textContent;
  return make('div', '', [label, group]);
}

function lcsCell(i) {
  return make('span', 'lcs', [bar(columns.lcs[i]), decimals(2)(columns.lcs[i])]);
}

/** The output; runs of tokens outside the common subsequence are marked. */
function markedOutput(i) {
  const parts = [];
  let wasMember = null;
  let room = CELL_LENGTH;
  outputTokens(i).forEach((token, position) => {
    if (room <= 0) return;
    const member = isMember(i, position);
    const text = data.vocabulary[token][1].slice(0, room);
    if (member !== wasMember) parts.push(member ? make('span') : make('mark', 'miss'));
    parts.at(-1).append(visible(text));
    wasMember = member;
    room -= text.length;
  });
  return clamped(parts);
}

// ---- The view: what is filtered, how it is sorted; kept in the address so that it can be linked

const NOTHING = { q: '', method: '', model: '', k: '', n: '', exact: '', sort: '', page: '1', open: '' };
let view = { ...NOTHING };
let shown = [];
const PAGE_SIZE = 100;

/** Whether the address holds a view; else it is a link to a section of the page. */
function readAddress() {
  const address = location.hash.slice(1);
  if (address && !address.includes('=')) return false;
  const given = new URLSearchParams(address);
  view = { ...NOTHING };
  for (const name of Object.keys(view)) if (given.has(name)) view[name] = given.get(name);
  return true;
}

function writeAddress() {
  const changed = Object.entries(view).filter(([name, value]) => value !== NOTHING[name]);
  const address = '#' + new URLSearchParams(changed);
  try {
    history.replaceState(null, '', address);
  } catch {
    location.hash = address; // some browsers refuse the former for files
  }
}

const openRows = () => new Set(view.open.split('.').filter(Boolean).map(Number));

function setView(change) {
  view = { ...view, page: '1', ...change };
  writeAddress();
  update();
}

const haystacks = [];
function haystack(i) {
  haystacks[i] ??= [target(i).id, target(i).text, promptText(i), outputText(i)]
    .join('\n').toLowerCase();
  return haystacks[i];
}

function filtered() {
  const query = view.q.toLowerCase();
  const method = view.method && data.methods.indexOf(view.method);
  const group = view.model && data.groups.indexOf(view.model);
  const rows = [];
  for (let i = 0; i < data.count; i++) {
    if (method !== '' && columns.method[i] !== method) continue;
    if (group !== '' && columns.group[i] !== group) continue;
    if (view.k && String(target(i).k) !== view.k) continue;
    if (view.n && String(promptLength(i)) !== view.n) continue;
    if (view.exact && (columns.exact[i] ? 'yes' : 'no') !== view.exact) continue;
    if (query && !haystack(i).includes(query)) continue;
    rows.push(i);
  }
  return rows;
}

const collator = new Intl.Collator('en', { numeric: true });
const ranks = {};

/** A number per row to sort by; texts are ranked once. */
function sortKeys(field) {
  if (ranks[field.key]) return ranks[field.key];
  const values = Array.from({ length: data.count }, (_, i) => field.value(i));
  if (field.kind?.includes('words')) {
    const order = new Map([...new Set(values)].sort(collator.compare).map((text, rank) => [text, rank]));
    ranks[field.key] = values.map((text) => order.get(text));
  } else {
    ranks[field.key] = values;
  }
  return ranks[field.key];
}

/** Rows without a value come last either way; equal rows keep their order. */
function sorted(rows) {
  const field = FIELDS.find((candidate) => candidate.key === view.sort.replace('-', ''));
  if (!field) return rows;
  const keys = sortKeys(field);
  const sign = view.sort.startsWith('-') ? -1 : 1;
  return rows.sort((a, b) => {
    if (keys[a] === null || keys[b] === null) return (keys[a] === null) - (keys[b] === null);
    return sign * (keys[a] - keys[b]) || a - b;
  });
}

// ---- Drawing

const table = document.getElementById('table');
const body = table.tBodies[0];
const form = document.getElementById('filters');
const pager = document.getElementById('pager');

function drawHead() {
  const cells = FIELDS.map((field) => {
    const cell = make('th', field.kind ?? '', button(field.title, () => sortBy(field)));
    cell.scope = 'col';
    cell.dataset.key = field.key;
    return cell;
  });
  table.tHead.append(make('tr', '', cells));
}

function sortBy(field) {
  const up = field.key, down = '-' + field.key;
  // Of numbers one wants the largest first, of words the first.
  const [first, second] = field.kind?.includes('words') ? [up, down] : [down, up];
  setView({ sort: view.sort === first ? second : first });
}

function drawFilters() {
  const search = make('input');
  Object.assign(search, { type: 'search', name: 'q', placeholder: 'target, prompt, output or id' });
  form.append(labelled('Search', search, 'wide'));
  const sizes = (values) => [...new Set(values)].filter((v) => v !== null).sort((a, b) => a - b);
  addChoice('method', 'Method', data.methods);
  addChoice('model', 'Model', data.groups);
  addChoice('k', 'k', sizes(data.targets.map((each) => each.k)));
  addChoice('n', 'N', sizes((columns.prompt ?? []).map((tokens) => tokens.length)));
  addChoice('exact', 'Outcome', [['yes', 'exact only'], ['no', 'unsolved only']]);
  form.append(button('Clear', () => setView(NOTHING), 'quiet'));
  form.addEventListener('input', (event) => setView({ [event.target.name]: event.target.value }));
  form.addEventListener('submit', (event) => event.preventDefault());
}

function labelled(name, control, className) {
  return make('label', className, [make('span', '', name), control]);
}

function addChoice(name, title, values) {
  const select = make('select');
  select.name = name;
  for (const choice of [['', 'all'], ...values]) {
    const [value, label] = Array.isArray(choice) ? choice : [choice, choice];
    const option = make('option', '', label);
    option.value = value;
    select.append(option);
  }
  form.append(labelled(title, select));
}

function update() {
  for (const control of form.elements) {
    if (control.name && control.value !== view[control.name]) control.value = view[control.name];
  }
  for (const cell of table.tHead.rows[0].cells) {
    const isSorted = view.sort.replace('-', '') === cell.dataset.key;
    if (!isSorted) cell.removeAttribute('aria-sort');
    else cell.setAttribute('aria-sort', view.sort.startsWith('-') ? 'descending' : 'ascending');
  }
  shown = sorted(filtered());
  drawPage();
}

function drawPage() {
  const pages = Math.max(1, Math.ceil(shown.length / PAGE_SIZE));
  const page = Math.min(Math.max(1, Number(view.page) || 1), pages);
  const first = (page - 1) * PAGE_SIZE;
  const rows = shown.slice(first, first + PAGE_SIZE);
  const open = openRows();
  body.replaceChildren(
    ...rows.flatMap((i) => (open.has(i) ? [resultRow(i, true), detailRow(i)] : resultRow(i))));
  const range = rows.length ? `${whole(first + 1)} to ${whole(first + rows.length)} of ` : '';
  const rest = shown.length < data.count ? ` (${whole(data.count)} in all)` : '';
  document.getElementById('count').textContent = `${range}${whole(shown.length)} results${rest}`;
  drawPager(page, pages);
}

function drawPager(page, pages) {
  const move = (label, to) => {
    const element = button(label, () => {
      setView({ page: String(to) });
      table.parentElement.scrollTop = 0;
      pager.querySelector(`[data-label="${label}"]:enabled, button:enabled`).focus();
    }, 'quiet');
    element.dataset.label = label;
    element.disabled = to < 1 || to > pages;
    return element;
  };
  const place = make('span', '', `page ${page} of ${pages}`);
  pager.replaceChildren(move('Previous', page - 1), place, move('Next', page + 1));
  pager.hidden = pages === 1;
}

function resultRow(i, isOpen = false) {
  const row = make('tr', columns.exact[i] ? 'result exact' : 'result');
  row.dataset.row = i;
  for (const field of FIELDS) {
    const value = field.value(i);
    const content = field.cell?.(i) ?? field.format?.(value) ?? value ?? DASH;
    const isFirst = field.key === 'id';
    const cell = make(isFirst ? 'th' : 'td', field.kind, isFirst ? make('button', 'open', content) : content);
    row.append(cell);
  }
  const opener = row.querySelector('button');
  opener.type = 'button';
  opener.setAttribute('aria-expanded', isOpen);
  row.firstChild.scope = 'row';
  return row;
}

function toggle(row) {
  const i = Number(row.dataset.row);
  const open = openRows();
  const isOpen = !open.delete(i);
  if (isOpen) row.after(detailRow(open.add(i) && i));
  else row.nextSibling.remove();
  row.querySelector('button').setAttribute('aria-expanded', isOpen);
  view.open = [...open].join('.');
  writeAddress();
}

body.addEventListener('click', (event) => {
  const row = event.target.closest('tr.result');
  const isSelecting = !getSelection().isCollapsed && !event.target.closest('button');
  if (row && !isSelecting) toggle(row);
});

// ---- Light and dark

function startTheme() {
  const root = document.documentElement;
  const toggleTheme = document.getElementById('theme');
  const systemIsDark = matchMedia('(prefers-color-scheme: dark)');
  const isDark = () => (root.dataset.theme ? root.dataset.theme === 'dark' : systemIsDark.matches);
  const label = () => (toggleTheme.textContent = isDark() ? 'Light' : 'Dark');
  toggleTheme.addEventListener('click', () => {
    root.dataset.theme = isDark() ? 'light' : 'dark';
    label();
  });
  systemIsDark.addEventListener('change', label);
  label();
}

startTheme();
drawHead();
drawFilters();
readAddress();
update();
addEventListener('hashchange', () => readAddress() && update());
addEventListener('beforeprint', () => {
  for (const folded of document.querySelectorAll('details')) folded.open = true;
});
