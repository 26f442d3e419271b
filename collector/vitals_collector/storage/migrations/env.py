"""Alembic's entry: runs the migrations on the connection that ``migrate`` hands in."""

from alembic import context

from vitals_collector.storage.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
)
context.run_migrations()
