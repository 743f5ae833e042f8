// A certified OpenID provider (npm's `oidc-provider`) with its own development login pages.
// Usage: node oidc_provider.mjs PORT REDIRECT_URI SECRET
import { createRequire } from "node:module";
const require = createRequire(process.cwd() + "/");
const { Provider } = require("oidc-provider");

const [port, redirect, secret] = process.argv.slice(2);
const groups = { ann: ["ops", "unrelated"], vic: ["staff"], mallory: ["strangers"] };

const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{
    client_id: "muster",
    client_secret: secret,
    redirect_uris: [redirect],
    response_types: ["code"],
    grant_types: ["authorization_code"],
  }],
  pkce: { required: () => true },
  claims: { openid: ["sub"], profile: ["preferred_username", "groups"] },
  cookies: { keys: ["test"] },
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({ sub: id, preferred_username: `${id}@example.com`, groups: groups[id] ?? [] }),
  }),
});
provider.listen(Number(port), "127.0.0.1", () => console.log("ready"));
