"""Alembic runs this for every migration: it renders SQL, which `gateway.storage.schema` runs in one transaction."""

from alembic import context

statements = context.config.attributes.get("statements")
if statements is None:
    raise SystemExit("migrations run through: tollhouse migrate")
context.configure(
    dialect_name=context.config.attributes["dialect"],
    output_buffer=statements,
    literal_binds=True,
    transactional_ddl=True,
)
context.run_migrations()
