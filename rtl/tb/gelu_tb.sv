// Checks gelu.sv against a folder of `qflash vectors --trace`: linear layers with GELU.
`include "case.svh"

module gelu_tb;
    localparam int SIZE = `STEP_GELU_u_SIZE;
    localparam int OUTPUTS = `IN_gelu_offset_SIZE;
    localparam int LATENCY = 4;

    logic clk = 1'b0;
    logic [`STEP_GELU_u_WIDTH-1:0] inputs[0:SIZE-1];
    logic [31:0] multipliers[0:OUTPUTS-1];
    logic [31:0] offsets[0:OUTPUTS-1];
    logic [7:0] wanted[0:SIZE-1];
    logic signed [31:0] u, offset;
    logic [13:0] multiplier;
    logic signed [7:0] y;
    int values = 0, mismatches = 0, cycles = 0;

    gelu dut (.shift(5'(`PARAM_gelu_shift)), .*);
    always #5 clk = ~clk;
    always @(posedge clk) cycles++;

    initial begin
        $readmemh(`STEP_GELU_u_FILE, inputs);
        $readmemh(`IN_gelu_multiplier_FILE, multipliers);
        $readmemh(`IN_gelu_offset_FILE, offsets);
        $readmemh(`STEP_y_FILE, wanted);
        for (int i = 0; i < SIZE + LATENCY - 1; i++) begin
            @(negedge clk);
            u = i < SIZE ? 32'($signed(inputs[i])) : 32'sd0;
            multiplier = 14'(multipliers[i%OUTPUTS]);
            offset = offsets[i%OUTPUTS];
            @(posedge clk);
            #1;
            if (i >= LATENCY - 1) begin
                values++;
                if (y !== wanted[i-LATENCY+1]) begin
                    mismatches++;
                    $display("y %0d: %0d, not %0d", i - LATENCY + 1, y, $signed(wanted[i-LATENCY+1]));
                end
            end
        end
        $display("%0d values, %0d mismatches, %0d cycles", values, mismatches, cycles);
        $finish;
    end
endmodule
