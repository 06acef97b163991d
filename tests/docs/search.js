// Runs the search of a site, as its pages do: node search.js SITE QUERY ... prints the pages found for each query.
const fs = require("fs"), path = require("path");
const [site, ...queries] = process.argv.slice(2);
const workers = path.join(site, "assets/javascripts/workers");
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json")));
let receive, sent;
Object.assign(globalThis, {
  self: globalThis,
  location: "https://docs.example/",
  addEventListener: (_, listener) => { receive = listener; },
  postMessage: (message) => { sent = message; },
});
(0, eval)(fs.readFileSync(path.join(workers, fs.readdirSync(workers).find((name) => name.endsWith(".js"))), "utf8"));
(async () => {
  await receive({ data: { type: 0, data: { ...index, options: {} } } });
  const found = {};
  for (const query of queries) {
    await receive({ data: { type: 2, data: query } });
    found[query] = sent.data.items.map(([first]) => first.location.split("#")[0]);
  }
  console.log(JSON.stringify(found));
})();
