"""`app`: an application without arguments, for `serve build`, which takes no builder.

    serve build serve.default:app -o lockstep.yaml

writes a Serve YAML in which each deployment's replicas and resources can be set; `serve deploy`
takes it. Arguments of one's own go into a module of one's own, `app = deploy({"config": FILE})`, or
into a YAML with `import_path: serve.app:deploy`, which needs no build.
"""

from serve.app import deploy

app = deploy({})
