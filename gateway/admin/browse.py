"""A page that shows the OpenAPI document and tries its operations. One file, nothing from another host."""

from __future__ import annotations

import base64
import hashlib

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:960px;padding:1rem;color:#1c2733;background:#fff}
h1{font-size:1.5rem}h2{margin:2rem 0 .5rem;font-size:1.1rem;text-transform:capitalize}
details{border:1px solid #d5dde5;border-radius:6px;margin:.3rem 0;padding:.3rem .7rem}
summary{cursor:pointer}code,pre,input,textarea{font:13px ui-monospace,monospace}
.m{display:inline-block;width:4.2rem;font-weight:700}.GET{color:#0b6e4f}.POST,.PUT,.PATCH{color:#8a5a00}.DELETE{color:#a4161a}
pre{background:#f4f7fa;padding:.6rem;overflow:auto;max-height:24rem}label{display:block;margin:.3rem 0}
input,textarea{width:100%;box-sizing:border-box;padding:.3rem;border:1px solid #b7c3cf;border-radius:4px}
textarea{height:7rem}button{padding:.3rem .9rem;margin:.4rem 0}.q{color:#5b6b7a}
@media(prefers-color-scheme:dark){body{background:#11181f;color:#dde6ee}pre{background:#1b2630}
details,input,textarea{border-color:#33424f}input,textarea{background:#1b2630;color:inherit}}
"""
_SCRIPT = """
'use strict';
const el=(tag,text,cls)=>{const e=document.createElement(tag);if(text)e.textContent=text;if(cls)e.className=cls;return e};
const key=document.getElementById('key');
const field=(box,name,about)=>{const l=el('label',name+(about?' - '+about:''));const i=el('input');i.name=name;l.append(i);
box.append(l);return i};
function operation(doc,path,method,op){
 const box=el('details'),head=el('summary');
 head.append(el('span',method.toUpperCase(),'m '+method.toUpperCase()),el('code',path),el('span',' '+op.summary,'q'));
 box.append(head,el('p',op.description));
 const inputs=(op.parameters||[]).map(p=>({p,i:field(box,p.name,p.description)}));
 let body=null;
 if(op.requestBody){const s=op.requestBody.content['application/json'].schema;const name=s.$ref.split('/').pop();
  const d=el('details');d.append(el('summary','body: '+name),el('pre',JSON.stringify(doc.components.schemas[name],null,1)));
  body=el('textarea');body.value='{}';box.append(d,body)}
 const go=el('button','Send'),out=el('pre');out.hidden=true;box.append(go,out);
 go.onclick=async()=>{
  let url=path;const q=new URLSearchParams(),h={Authorization:'Bearer '+key.value};
  for(const {p,i} of inputs){if(!i.value)continue;
   if(p.in==='path')url=url.replace('{'+p.name+'}',encodeURIComponent(i.value));
   else if(p.in==='query')q.append(p.name,i.value);else h[p.name]=i.value}
  if(body)h['Content-Type']='application/json';
  out.hidden=false;out.textContent='...';
  try{const r=await fetch(url+(q.size?'?'+q:''),{method:method.toUpperCase(),headers:h,body:body?body.value:undefined});
   const t=await r.text();let shown=t;try{shown=JSON.stringify(JSON.parse(t),null,1)}catch(e){}
   out.textContent=r.status+' '+r.statusText+(r.headers.get('etag')?'\\nETag: '+r.headers.get('etag'):'')+'\\n\\n'+shown}
  catch(e){out.textContent=String(e)}};
 return box}
fetch('openapi.json').then(r=>r.json()).then(doc=>{
 const main=document.getElementById('main');document.getElementById('v').textContent=doc.info.version;
 for(const tag of doc.tags){main.append(el('h2',tag.name));
  for(const [path,methods] of Object.entries(doc.paths))for(const [method,op] of Object.entries(methods))
   if(op.tags[0]===tag.name)main.append(operation(doc,path,method,op))}});
"""
PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Tollhouse admin API</title><style>{_STYLE}</style></head>
<body><h1>Tollhouse admin API <span id="v" class="q"></span></h1>
<p><a href="openapi.json">openapi.json</a></p>
<label>Admin key (stays in this page)<input id="key" type="password" autocomplete="off"></label>
<div id="main"></div><script>{_SCRIPT}</script></body></html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


#: Only what stands in this page runs, and it talks to this listener alone.
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; connect-src 'self'; style-src {_hash(_STYLE)}; "
    f"script-src {_hash(_SCRIPT)}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
