// The details of one result, made when it is opened.

function detailRow(i) {
  const cell = make('td', '', details(i));
  cell.colSpan = FIELDS.length;
  return make('tr', 'detail', cell);
}

function details(i) {
  const said = make('div', 'said-side', [
    section('Target', chips(target(i).tokens), asText(target(i).text, target(i).tokens)),
    section('Prompt', promptChips(i), asText(promptText(i), columns.prompt[i]), copyButton(i)),
    section('Output', chips(outputTokens(i), (position) => isMember(i, position)),
      asText(outputText(i), outputTokens(i))),
    section('LCS by form of the prompt and decode', matrix(i)),
    section('Settings', definitions(Object.entries(data.settings[columns.settings[i]]))),
  ]);
  const measured = make('div', 'measured-side', [
    section('Search', ...charts(i)),
    section('Measured', definitions(measurements(i))),
    section('Ran on', definitions(Object.entries(data.environments[columns.environment[i]])),
      make('p', 'fine', ['To check this row, decode its prompt again: ',
        make('code', '', 'python -m dlmi verify RUN_FOLDER')])),
  ]);
  return make('div', 'details', [said, measured]);
}

function section(title, ...content) {
  return make('section', '', [make('h4', '', title), ...content.filter(Boolean)]);
}

function chip(token, isHit = true) {
  const [id, text] = data.vocabulary[token];
  const shownText = text.replaceAll(' ', '·') || '∅';
  const element = isHit ? make('span', 'chip', shownText) : make('mark', 'chip miss', shownText);
  element.title = `token ${id}` + (isHit ? '' : ', not in the longest common subsequence');
  return element;
}

function chips(tokens, isHit = () => true) {
  return make('div', 'chips', tokens.map((token, position) => chip(token, isHit(position))));
}

/** The text as a whole where its tokens alone do not spell it, as with characters of many bytes. */
function asText(text, tokens) {
  const spelled = tokens.map((token) => data.vocabulary[token][1]).join('');
  return spelled !== text && make('p', 'fine', ['as text: ', make('code', '', text)]);
}

/** The prompt's tokens, each over bars of the method's numbers at its position. */
function promptChips(i) {
  const tokens = columns.prompt[i];
  const perPosition = Object.entries(columns.diagnostics[i])
    .filter(([, values]) => values.length === tokens.length);
  if (!perPosition.length) return chips(tokens);
  const list = make('div', 'chips positions', tokens.map((token, position) => {
    const bars = perPosition.map(([name, values]) => positionBar(name, values, position));
    return make('div', 'position', [chip(token), ...bars]);
  }));
  const names = perPosition.map(([name]) => name).join(' and ');
  const legend = `Bars: ${names} of each position at the last step; the tokens are the best of the run.`;
  return make('div', '', [list, make('p', 'fine', legend)]);
}

function positionBar(name, values, position) {
  const value = values[position];
  const share = Math.max(value ?? 0, 0) / Math.max(...values, 1e-9);
  const element = make('span', `value ${name === 'tau' ? 'tau' : ''}`, [
    make('span', 'name', name === 'tau' ? 'τ' : name), bar(share), compact(value)]);
  element.title = `${name} ${compact(value)}`;
  return element;
}

function copyButton(i) {
  const status = make('output', 'fine');
  const copy = button('Copy prompt', async () => {
    try {
      await navigator.clipboard.writeText(promptText(i));
      status.textContent = 'copied';
    } catch {
      copyBySelection(promptText(i), status); // pages opened as files may have no clipboard
    }
  }, 'quiet');
  return make('p', 'copy', [copy, status]);
}

function copyBySelection(text, status) {
  const area = make('textarea');
  area.value = text;
  area.readOnly = true;
  status.replaceChildren(area);
  area.select();
  if (document.execCommand('copy')) status.textContent = 'copied';
  else status.append('press Ctrl+C');
}

function measurements(i) {
  const fromText = `no: LCS ${decimals(3)(columns.round_trip_lcs[i])} from text`;
  const stop = data.stops[columns.stop[i]];
  return [
    ['honest LCS', decimals(3)(columns.lcs[i])],
    ['as in code (not comparable)', decimals(3)(columns.as_in_code_lcs[i])],
    ['prompt survives being text', columns.round_trips[i] ? 'yes' : fromText],
    ['best found at step', `${whole(columns.best_step[i])} of ${whole(columns.steps[i])}, ${stop}`],
    ['token passes', `${whole(columns.forward_tokens[i])} forward, ${whole(columns.backward_tokens[i])} backward`],
    ['discrete cross-entropy', compact(columns.discrete_loss[i])],
    ['prompt perplexity', compact(columns.prompt_perplexity[i])],
    ['prompt positions with a target token', percent(columns.overlap_ratio[i])],
    ['target tokens in the prompt', percent(columns.target_hit_ratio[i])],
    ['target tokens ranked first with no prompt', percent(target(i).rankOne)],
  ];
}

function definitions(pairs) {
  const entry = ([name, value]) => make('div', '', [make('dt', '', name), make('dd', '', value)]);
  return make('dl', 'pairs', pairs.map(entry));
}

function matrix(i) {
  const spaced = (name) => name.replaceAll('_', ' ');
  const heading = (name, scope) => Object.assign(make('th', '', spaced(name)), { scope });
  const head = make('tr', '', ['prompt', ...data.decodes].map((name) => heading(name, 'col')));
  const rows = data.forms[columns.form[i]].map((form, place) => {
    const scores = data.decodes.map((decode, offset) => {
      const score = columns.matrix[i][place * data.decodes.length + offset];
      const cell = make('td', 'score', decimals(2)(score));
      cell.style.setProperty('--share', score ?? 0);
      if (form === 'best_so_far' && decode === 'free_greedy') cell.append(make('span', 'tag', 'honest'));
      return cell;
    });
    return make('tr', '', [heading(form, 'row'), ...scores]);
  });
  return make('table', 'matrix', [make('thead', '', head), make('tbody', '', rows)]);
}

// ---- Charts

function charts(i) {
  const [place, lcs, losses] = columns.trace[i];
  const steps = data.steps[place];
  let best = 0;
  const bestSoFar = lcs.map((value) => (best = Math.max(best, value ?? 0)));
  const evaluations = columns.evaluations[i];
  const thinned = steps.length < evaluations ? ` (${steps.length} of ${evaluations} evaluations)` : '';
  const mark = columns.best_step[i];
  const finite = losses.filter((value) => value !== null);
  return [
    chart(`Honest LCS by step${thinned}`, steps, 1, mark, [['now', lcs, false], ['best', bestSoFar, true]]),
    chart('Discrete cross-entropy by step', steps, Math.max(...finite, 1e-9), mark, [['now', losses, false]]),
    make('p', 'fine key', [make('span', 'swatch best'), 'best so far ',
      make('span', 'swatch now'), 'prompt of that step ',
      make('span', 'swatch mark'), `best found (step ${whole(mark)})`]),
  ];
}

/** A small line chart from 0 to `top`; `mark` is a step to point out. */
function chart(title, steps, top, mark, lines) {
  const [left, right, upper, lower] = [40, 388, 10, 100];
  const last = Math.max(...steps, mark, 1);
  const x = (step) => left + ((right - left) * step) / last;
  const y = (value) => lower - ((lower - upper) * value) / top;
  const svg = drawn('svg', { class: 'chart', viewBox: '0 0 400 120', role: 'img' });
  const ends = lines.map(([name, values]) =>
    `${name}: ${compact(values[0])} at first, ${compact(values.at(-1))} at last`);
  svg.setAttribute('aria-label', `${title}. ${ends.join('; ')}.`);
  for (const share of [0, 0.5, 1]) {
    const height = y(share * top);
    svg.append(drawn('line', { class: 'grid', x1: left, x2: right, y1: height, y2: height }));
    svg.append(drawn('text', { x: left - 6, y: height + 4, 'text-anchor': 'end' }, compact(share * top)));
  }
  for (const step of [0, last / 2, last]) {
    const anchor = step === last ? 'end' : 'middle';
    svg.append(drawn('text', { x: x(step), y: 116, 'text-anchor': anchor }, whole(step)));
  }
  svg.append(drawn('line', { class: 'mark', x1: x(mark), x2: x(mark), y1: upper, y2: lower }));
  for (const [name, values, isStepped] of lines) {
    const points = steps.map((step, p) => [x(step), values[p]]).filter(([, value]) => value !== null);
    const path = points.map(([px, value], p) =>
      p === 0 ? `M${px},${y(value)}` : isStepped ? `H${px}V${y(value)}` : `L${px},${y(value)}`);
    if (path.length === 1) path.push('h1'); // a search of one evaluation: a dot
    svg.append(drawn('path', { class: `line ${name}`, d: path.join('') }));
  }
  return make('figure', '', [make('figcaption', '', title), svg]);
}
