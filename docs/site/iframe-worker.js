// Opened from disk, a page may start no worker: the search runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      // The worker posts to its frame, which hands on what it did not get from here.
      frame.srcdoc = `<script>
        const page = parent;
        self.postMessage = data => page.dispatchEvent(new MessageEvent("search", { data }));
      <\/script><script src="${new URL(url, location)}"><\/script>`;
      this.frame = new Promise(ready => { frame.onload = () => ready(frame.contentWindow); });
      window.addEventListener("search", ({ data }) => this.dispatchEvent(new MessageEvent("message", { data })));
      document.body.append(frame);
    }
    postMessage(data) {
      this.frame.then(to => to.dispatchEvent(new to.MessageEvent("message", { data })));
    }
    terminate() {}
  };
