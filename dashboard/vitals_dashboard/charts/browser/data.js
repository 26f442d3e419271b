// What is drawn and saved, of the data alone: merged marks, parts that add up, a table as CSV.

export const APART = 32; // pixels: a shape and a number of three digits

// Groups of marks [kind, place, words, charts, number] of one kind, by place. A group has the marks
// within APART pixels of its first one, so no two groups of a kind touch.
export function grouped(marks, xOf) {
  const open = new Map();
  const groups = [];
  for (const mark of [...marks].sort((a, b) => a[1] - b[1])) {
    const [kind, place, , , num] = mark;
    const x = xOf(place);
    let group = open.get(kind);
    if (!group || x - group.x >= APART) {
      open.set(kind, (group = { kind, x, first: place, num: 0, marks: [] }));
      groups.push(group);
    }
    Object.assign(group, { last: place, end: x, num: group.num + num });
    group.marks.push(mark);
  }
  return groups;
}

// Columns of parts, each on top of those after it: the last one is at the bottom.
export function stacked(columns) {
  const sums = [...columns];
  for (let i = columns.length - 2; i >= 0; i--)
    sums[i] = columns[i].map((value, j) => {
      const below = sums[i + 1][j];
      return value == null ? below ?? value : value + (below ?? 0);
    });
  return sums;
}

// A table as CSV. A text that a spreadsheet would run has an apostrophe before it.
export function csv(names, columns) {
  const rows = columns.length ? columns[0].map((_, i) => columns.map((column) => column[i])) : [];
  return [names, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

function cell(value) {
  if (value == null) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
